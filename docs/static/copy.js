"use strict";

// What to run of a block: prompts are left out, and what was printed between them.
const toRun = (code) => {
  const own = code.cloneNode(true);
  const prompts = own.querySelectorAll(".gp");
  if (!prompts.length) return own.textContent;
  for (const said of own.querySelectorAll(".gp, .go, .gt, .gr")) said.remove();
  return own.textContent.replace(/^\s*\n/gm, "");
};

// A button on each block of code; what a program prints (`text`) has none.
for (const block of document.querySelectorAll("div.highlight:not(.highlight-text *)")) {
  const code = block.querySelector("pre");
  const button = document.createElement("button");
  button.type = "button";
  button.className = "copy";
  button.textContent = "Copy";
  button.addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(toRun(code));
      button.textContent = "Copied";
    } catch {
      // Browsers refuse where a page came without https: then the code is selected.
      getSelection().selectAllChildren(code);
      button.textContent = "Selected";
    }
    setTimeout(() => (button.textContent = "Copy"), 2000);
  });
  block.append(button);
}
