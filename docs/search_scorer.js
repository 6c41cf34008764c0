// Weights of the search: Sphinx's own, and what is said below of parameters.
var Scorer = {
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,

  // Parameters are objects named `batchax.vmap.batch_size`. Whoever looks for `vmap` wants the function
  // first: those whose own name has nothing of the words come last.
  score: ([, name, , description, score]) => {
    if (!description?.startsWith("parameter of a function")) return score;
    const words = new URLSearchParams(location.search).get("q").toLowerCase();
    const own = name.toLowerCase().split(".").at(-1);
    return splitQuery(words).some((word) => own.includes(word)) ? score : score - 100;
  },
};
