// The form "Which scheme?": asks what common/cli/recommend.py asks, and decides by the same rules (RULES, of Comparison/rules.json).
"use strict";

const FAR = 3; // times what was measured, from which on a line says so

function stepsPerMessage(facts) {
  const link = facts.mbit ? (32 * facts.parameters) / (1000 * facts.mbit) : 0;
  return (2 * (facts.latency_ms + link)) / facts.step_ms;
}

function isNumber(fact) {
  return "least" in fact;
}

function number(value) {
  return value >= 100 || Number.isInteger(value) ? value.toFixed(0) : String(Number(value.toPrecision(3)));
}

function recommend(given) {
  const facts = { ...given, messages: stepsPerMessage(given) };
  const [rule, ...others] = RULES.rules.filter((each) => each.fact === null || facts[each.fact] >= each.least);
  const notes = [];
  const said = new Set([null, rule.fact]);
  for (const other of others) {
    if (said.has(other.fact)) continue;
    said.add(other.fact);
    notes.push(`Also true here: ${other.says}. No run has measured both together.`);
  }
  for (const [name, measured] of Object.entries(rule.measured)) {
    const isFew = facts[name] * FAR < measured && ["parameters", "workers", rule.fact].includes(name);
    if (facts[name] > FAR * measured || isFew) {
      const what = RULES.units[name].replace("{}", number(measured));
      notes.push(`Measured with ${what}, not with ${number(facts[name])}.`);
    }
  }
  return { rule, notes };
}

function element(parent, name, text, attributes = {}) {
  const made = parent.appendChild(document.createElement(name));
  made.textContent = text;
  return Object.assign(made, attributes);
}

function show(form, answer) {
  const given = {};
  for (const fact of RULES.facts) {
    const input = form.elements[fact.name];
    given[fact.name] = isNumber(fact) ? input.valueAsNumber : Number(input.checked);
  }
  answer.replaceChildren();
  const wrong = RULES.facts.find((fact) => !form.elements[fact.name].checkValidity());
  if (wrong) {
    element(answer, "p", `${wrong.label}: ${form.elements[wrong.name].validationMessage}`);
    return;
  }
  const { rule, notes } = recommend(given);
  const first = element(answer, "p", "Begin with ");
  element(first, "a", rule.scheme, { href: `../${rule.folder}/${rule.folder}.html` });
  if (rule.flags) {
    first.append(" ");
    element(first, "code", rule.flags);
  } else {
    first.append(` (${rule.note})`);
  }
  first.append(`: ${rule.says}.`);
  const link = rule.support.match(/^\[(.*)\]\(\{prefix\}(.*)\.md(#.*)\)$/);
  const second = element(answer, "p", link ? "" : `Measured: ${rule.support}`);
  if (link) element(second, "a", "Measured", { href: `../${link[2]}.html${link[3]}` });
  second.append(`; ${rule.why}.${rule.support.endsWith(" s") ? ` In ${RULES.target}.` : ""}`);
  for (const note of notes) element(answer, "p", note, { className: "note" });
}

const form = document.getElementById("which");
for (const fact of RULES.facts) {
  const label = element(form, "label", `${fact.label} `);
  const input = element(label, "input", "", { name: fact.name, type: isNumber(fact) ? "number" : "checkbox" });
  if (isNumber(fact)) Object.assign(input, { step: "any", required: true, min: fact.least, value: fact.default });
}
const answer = element(form, "output", "", { id: "which-answer" });
form.addEventListener("input", () => show(form, answer));
form.addEventListener("submit", (event) => event.preventDefault());
show(form, answer);
