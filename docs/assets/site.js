// What scrolls sideways can be reached by keyboard.
document$.subscribe(() => {
  for (const box of document.querySelectorAll(".md-typeset__scrollwrap, .md-typeset pre > code, .highlight pre")) {
    if (box.scrollWidth > box.clientWidth) {
      box.tabIndex = 0;
      box.setAttribute("role", "region");
      box.setAttribute("aria-label", box.tagName === "DIV" ? "table" : "code");
    }
  }
});
