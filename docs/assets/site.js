// What Material leaves out for people without a mouse or without eyes, and for phones.
document$.subscribe(() => {
  document.querySelector(".md-search")?.setAttribute("aria-label", "Search");
  findOptions(document.querySelector("[data-md-component=search-query]"));
  for (const box of document.querySelectorAll(".md-typeset__scrollwrap, .md-typeset pre > code")) {
    if (box.scrollWidth > box.clientWidth) box.tabIndex = 0; // what scrolls sideways can be reached by keyboard
  }
  for (const code of document.querySelectorAll(".md-typeset code:not(pre code, h1 code)")) {
    if (code.textContent.length <= 30) code.classList.add("short"); // site.css keeps it on one line
  }
  for (const table of document.querySelectorAll(".md-typeset table:not([class])")) {
    const names = [...table.querySelectorAll("th")].map((cell) => cell.textContent.trim());
    for (const cell of table.querySelectorAll("td")) {
      if (cell.cellIndex > 0 && names[cell.cellIndex]) cell.dataset.column = names[cell.cellIndex];
    }
  }
  for (const code of document.querySelectorAll(".language-bash pre > code")) {
    for (const node of [...code.childNodes].filter((each) => each.nodeType === Node.TEXT_NODE)) {
      node.replaceWith(...node.data.split(/(\s+)/).map((text) => (text.trim() ? word(text) : text)));
    }
    markFirstWords(code);
  }
});

// Lets the search find an option as it is written, `--numa`: for lunr, a dash before a word excludes the word.
function findOptions(input) {
  const typed = Object.getOwnPropertyDescriptor(HTMLInputElement.prototype, "value");
  if (!input) return;
  Object.defineProperty(input, "value", {
    configurable: true,
    get: () => typed.get.call(input).replace(/(^|\s)-+/g, "$1"),
    set: (text) => typed.set.call(input, text),
  });
}

// Names the first element of each line, which site.css moves to the left of the wrapped rest.
function markFirstWords(code) {
  let begins = true;
  for (const node of code.childNodes) {
    if (begins && node.nodeType === Node.ELEMENT_NODE) node.classList.add("first");
    begins = node.nodeType === Node.TEXT_NODE ? begins || node.data.includes("\n") : node.textContent.endsWith("\n");
  }
}

// A word of a command that wraps only before and after it: browsers would also break lines after its hyphens.
function word(text) {
  const span = document.createElement("span");
  span.className = "word";
  span.textContent = text;
  return span;
}
