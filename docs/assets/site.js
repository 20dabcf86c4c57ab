// What Material leaves out for people without a mouse or without eyes.
document$.subscribe(() => {
  document.querySelector(".md-search")?.setAttribute("aria-label", "Search");
  for (const box of document.querySelectorAll(".md-typeset__scrollwrap, .md-typeset pre > code")) {
    if (box.scrollWidth > box.clientWidth) box.tabIndex = 0; // what scrolls sideways can be reached by keyboard
  }
});
