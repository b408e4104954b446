// Filters above each table whose box has data-filters: a field for words, and a choice for each column named there.
// Without this script the whole table is there.
"use strict";

function addFilters(box) {
  const table = box.querySelector("table");
  const heads = [...table.tHead.rows[0].cells].map(cell => cell.textContent.trim());
  const rows = [...table.tBodies[0].rows];
  const said = (row, head) => row.cells[heads.indexOf(head)].textContent.trim();
  const texts = new Map(rows.map(row => [row, [...row.cells].map(cell => cell.textContent).join("\n").toLowerCase()]));
  const bar = document.createElement("form");
  bar.className = "table-filters";
  bar.setAttribute("aria-label", `Filters of the ${box.dataset.rows}`);
  const shown = document.createElement("p");
  shown.setAttribute("role", "status");

  function add(name, control) {
    const label = document.createElement("label");
    control.name = name;
    label.append(`${name} `, control);
    bar.append(label);
    return control;
  }

  const words = add("words", document.createElement("input"));
  words.type = "search";
  const asked = box.dataset.filters.split(",").map(head => {
    const select = add(head, document.createElement("select"));
    select.append(new Option("all", ""));
    for (const value of [...new Set(rows.map(row => said(row, head)))].sort()) select.append(new Option(value));
    return [head, select];
  });

  function apply() {
    const wanted = words.value.toLowerCase().split(/\s+/);
    for (const row of rows) {
      const chosen = asked.every(([head, select]) => !select.value || said(row, head) === select.value);
      row.hidden = !chosen || !wanted.every(word => texts.get(row).includes(word));
    }
    const left = rows.filter(row => !row.hidden);
    // A statement has a row for each claim, cause and verdict; all of them have the same entry or link.
    const entries = new Set(left.map(row => row.cells[0].querySelector("[data-entry]")?.dataset.entry
      ?? row.cells[0].querySelector("a")?.hash ?? row));
    shown.textContent = `${entries.size} ${box.dataset.rows}, ${left.length} of ${rows.length} rows`;
  }

  bar.addEventListener("input", apply);
  bar.addEventListener("change", apply);
  bar.addEventListener("submit", event => event.preventDefault());
  bar.append(shown);
  (table.closest(".md-typeset__scrollwrap") ?? table).before(bar);
  apply();
}

document.querySelectorAll("[data-filters]").forEach(addFilters);
