// Orders what a search finds: titles and headings first, the guide and notebooks before other pages, the API last.
var Scorer = {
  objNameMatch: 11, objPartialMatch: 6, objPrio: { 0: 15, 1: 5, 2: -5 }, objPrioDefault: 0, // as in Sphinx
  title: 15, partialTitle: 7, term: 5, partialTerm: 2,
  score: ([page, title, , , found, file, kind]) => {
    const asked = new URLSearchParams(location.search).get("q").toLowerCase().trim();
    const score = found + (title.toLowerCase().startsWith(asked) ? 1 : 0);
    if (kind === "object" || page.startsWith("api/")) return score - 1000;
    if (/\.\w+\.md$/.test(file)) return score - 500; // a script
    if (/^(benchmarks|tests|CHANGELOG|CONTRIBUTING)\b/.test(page)) return score - 3;
    if (page.startsWith("book/")) return score + 6;
    return file.endsWith(".ipynb") ? score + 3 : score;
  },
};
