"use strict";
// The page reads well without this; with it, pointing at an equation shows its details and its
// neighbours, and arrow keys walk the program.
(() => {
  const root = document.documentElement;
  const byId = (id) => document.getElementById(id);
  const rowOf = (node) => (node instanceof Element ? node.closest(".row") : null);

  // Theme: what was chosen is remembered where a page may remember anything.
  const memory = {
    get() { try { return localStorage.getItem("batchax-theme"); } catch { return null; } },
    set(value) { try { localStorage.setItem("batchax-theme", value); } catch { /* not allowed */ } },
  };
  const button = byId("theme");
  const system = matchMedia("(prefers-color-scheme: dark)");
  const show = () => {
    const chosen = root.dataset.theme;
    button.setAttribute("aria-pressed", String(chosen ? chosen === "dark" : system.matches));
  };
  const remembered = memory.get();
  if (remembered === "dark" || remembered === "light") root.dataset.theme = remembered;
  button.addEventListener("click", () => {
    root.dataset.theme = button.getAttribute("aria-pressed") === "true" ? "light" : "dark";
    memory.set(root.dataset.theme);
    show();
  });
  system.addEventListener("change", show);
  button.hidden = false;
  show();

  // Details beside the program, and neighbours marked.
  const flow = document.querySelector(".flow");
  const inspector = byId("inspector");
  inspector.hidden = false;
  let rails = null; // value and scope -> rails, made when first needed
  let marked = [];
  let current = null;

  const railsOf = (scope) => {
    rails ??= new Map();
    if (!rails.has(scope)) {
      const named = new Map();
      for (const rail of scope.querySelectorAll(":scope > .rails > .rail")) {
        for (const key of ["=" + rail.dataset.value, "<" + (rail.dataset.from ?? "")]) {
          if (!named.has(key)) named.set(key, []);
          named.get(key).push(rail);
        }
      }
      for (const value of scope.querySelectorAll(":scope > ul > .value")) {
        for (const name of value.dataset.name.split("\n")) {
          const key = "=" + name;
          if (!named.has(key)) named.set(key, []);
          named.get(key).push(value);
        }
      }
      rails.set(scope, named);
    }
    return rails.get(scope);
  };
  const words = (text) => (text ? text.split(" ") : []);
  const mark = (node, ...names) => {
    node.classList.add(...names);
    marked.push(node);
  };
  const inspect = (row) => {
    if (row === current) return;
    current = row;
    for (const node of marked) node.classList.remove("here", "near", "maker", "user-of");
    marked = [];
    if (!row) return;
    inspector.replaceChildren(row.querySelector(".panel").cloneNode(true));
    inspector.firstChild.className = "copy";
    inspector.scrollTop = 0;
    mark(row, "here");
    for (const number of words(row.dataset.takes)) {
      const other = byId("e" + number);
      if (other) mark(other, "near", "maker");
    }
    for (const number of words(row.dataset.gives)) {
      const other = byId("e" + number);
      if (other) mark(other, "near", "user-of");
    }
    const near = railsOf(row.closest(".scope"));
    for (const name of row.dataset.values?.split("\n") ?? []) {
      for (const rail of near.get("=" + name) ?? []) mark(rail, "near");
    }
    for (const rail of near.get("<" + row.id.slice(1)) ?? []) mark(rail, "near");
  };
  flow.addEventListener("mouseover", (event) => {
    const row = rowOf(event.target);
    if (row) inspect(row);
  });
  flow.addEventListener("focusin", (event) => inspect(rowOf(event.target)));

  // Links open what hides their target, and give it the focus.
  const reveal = (id) => {
    const target = byId(id);
    if (!target) return false;
    if (target.closest(".missed")) seek("");
    for (let at = target.parentElement; at; at = at.parentElement) {
      if (at.localName === "details") at.open = true;
    }
    const place = target.classList.contains("row")
      ? target.querySelector(":scope > .equation > summary")
      : target;
    place.scrollIntoView({ block: "center" });
    place.focus({ preventScroll: true, focusVisible: true });
    return true;
  };
  document.addEventListener("click", (event) => {
    const link = event.target.closest?.("a[href^='#']");
    if (link && reveal(decodeURIComponent(link.hash.slice(1)))) {
      event.preventDefault();
      try { history.pushState(null, "", link.hash); } catch { /* in a frame */ }
    }
  });
  const arrive = () => location.hash && reveal(decodeURIComponent(location.hash.slice(1)));
  addEventListener("popstate", arrive);
  arrive();

  // Search: equations and lines with all the words stay, with what they are inside of.
  const field = byId("find");
  let places = null; // what can be found, and its words; made when first needed
  let hits = [];
  let opened = [];
  const seek = (text) => {
    field.value = text;
    const asked = words(text.trim().toLowerCase().replace(/\s+/g, " "));
    places ??= [...document.querySelectorAll(".flow .row, .again li, .lines tbody tr")].map((node) => {
      const own = node.querySelector(":scope > .equation") ?? node;
      return [node, `${own.textContent} ${node.dataset.place ?? ""}`.toLowerCase()];
    });
    opened.forEach((box) => (box.open = false));
    opened = [];
    hits = [];
    for (const [node, said] of places) {
      const hit = asked.every((word) => said.includes(word));
      node.classList.toggle("missed", !hit);
      if (hit) hits.push(node);
    }
    const found = new Set(hits);
    for (const box of document.querySelectorAll(".flow .again")) {
      box.classList.toggle("missed", ![...box.querySelectorAll("li")].some((node) => found.has(node)));
    }
    for (const hit of asked.length ? hits : []) {
      for (let at = hit.parentElement; at && !at.classList.contains("flow"); at = at.parentElement) {
        at.classList.remove("missed");
        if (at.localName !== "details" || at.open) continue;
        at.open = true;
        opened.push(at);
      }
    }
    flow.classList.toggle("searched", asked.length > 0);
    const rows = hits.filter((hit) => hit.localName === "tr").length;
    const number = (n, what) => `${n.toLocaleString("en")} ${what}${n === 1 ? "" : "s"}`;
    byId("found").value = asked.length
      ? `${number(hits.length - rows, "equation")}, ${number(rows, "line")}`
      : "";
  };
  field.addEventListener("input", () => seek(field.value));
  const next = () => {
    const at = hits.findIndex((hit) => hit === document.activeElement.closest(".row, .again li, tr"));
    const hit = hits[(at + 1) % hits.length];
    if (hit) reveal(hit.id);
  };
  field.addEventListener("keydown", (event) => {
    if (event.key === "Enter") next();
    else if (event.key === "Escape") seek("");
    else return;
    event.preventDefault();
  });
  document.addEventListener("keydown", (event) => {
    if (event.key !== "/" || event.target === field || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    field.focus();
  });
  document.querySelector(".find").hidden = false;

  // Arrow keys.
  const summaries = "summary";
  const seen = (node) => {
    return !node.parentElement.parentElement.closest("details:not([open])") && !node.closest(".missed");
  };
  const step = (from, by) => {
    const all = [...flow.querySelectorAll(summaries)];
    for (let k = all.indexOf(from) + by; k >= 0 && k < all.length; k += by) {
      if (seen(all[k]) && !all[k].closest(".panel")) return all[k];
    }
    return null;
  };
  const outward = (node) =>
    node.parentElement.classList.contains("part")
      ? node.closest(".row").querySelector("summary")
      : node.closest(".part")?.firstElementChild;
  flow.addEventListener("keydown", (event) => {
    const at = event.target;
    if (at.localName !== "summary" || event.ctrlKey || event.metaKey || event.altKey) return;
    const box = at.parentElement;
    const inner = box.classList.contains("part")
      ? []
      : [...box.parentElement.querySelectorAll(":scope > .part")];
    const all = () => flow.querySelectorAll(".scope > ol > .row > .equation > summary");
    let to = null;
    if (event.key === "ArrowDown") to = step(at, 1);
    else if (event.key === "ArrowUp") to = step(at, -1);
    else if (event.key === "Home") to = all()[0];
    else if (event.key === "End") to = [...all()].findLast(seen);
    else if (event.key === "ArrowRight") {
      if (inner.length && inner.some((part) => !part.open)) inner.forEach((part) => (part.open = true));
      else if (inner.length) to = inner[0].firstElementChild;
      else if (!box.open) box.open = true;
      else if (box.classList.contains("part")) to = step(at, 1);
    } else if (event.key === "ArrowLeft") {
      if (box.open) box.open = false;
      else if (inner.some((part) => part.open)) inner.forEach((part) => (part.open = false));
      else to = outward(at);
    } else return;
    event.preventDefault();
    to?.focus();
    to?.scrollIntoView({ block: "nearest" });
  });

  // Buttons, and paper.
  const tools = document.querySelector(".tools");
  document.querySelector(".how").hidden = false;
  tools.hidden = !flow.querySelector(".part");
  const setAll = (open) => flow.querySelectorAll(".part").forEach((part) => (part.open = open));
  byId("open").addEventListener("click", () => setAll(true));
  byId("close").addEventListener("click", () => {
    setAll(false);
    flow.querySelectorAll(".equation[open]").forEach((box) => (box.open = false));
  });
  let closed = [];
  addEventListener("beforeprint", () => {
    closed = [...document.querySelectorAll(".part:not([open]), .links details:not([open])")];
    closed.forEach((box) => (box.open = true));
  });
  addEventListener("afterprint", () => closed.forEach((box) => (box.open = false)));
})();
