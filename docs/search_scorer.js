// Weights of the search: Sphinx's own, except for parameters and kinds of pages.
var Scorer = {
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,

  // Parameters are objects named `batchax.vmap.batch_size`. A search for `vmap` lists the function
  // first: parameters whose own name has nothing of the words come last.
  // Pages for users come before those for contributors.
  score: ([page, name, , description, score]) => {
    if (/^(benchmarks|decisions|architecture|changes|contributing|examples)/.test(page)) return score - 3;
    if (!description?.startsWith("parameter of a function")) return score;
    const words = new URLSearchParams(location.search).get("q").toLowerCase();
    const own = name.toLowerCase().split(".").at(-1);
    return splitQuery(words).some((word) => own.includes(word)) ? score : score - 100;
  },
};
