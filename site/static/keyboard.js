/* A formula that is wider than the page can be scrolled from the keyboard. */
async function reachWideFormulas() {
  await window.MathJax?.startup?.promise;
  for (const formula of document.querySelectorAll("mjx-container[display]")) {
    if (formula.scrollWidth > formula.clientWidth) formula.tabIndex = 0;
    else formula.removeAttribute("tabindex");
  }
}
addEventListener("load", reachWideFormulas);
addEventListener("resize", reachWideFormulas);
