// Filters above the table of claims. Without this script the whole table is there.
"use strict";

const FILTERS = ["paper", "cause", "verdict"];

function filterClaims(table) {
  const heads = [...table.tHead.rows[0].cells].map(cell => cell.textContent.trim());
  const rows = [...table.tBodies[0].rows];
  const said = (row, head) => row.cells[heads.indexOf(head)].textContent.trim();
  const bar = document.createElement("form");
  bar.className = "claims-filters";
  const shown = document.createElement("p");
  shown.setAttribute("role", "status");

  const asked = FILTERS.map(head => {
    const label = document.createElement("label");
    const select = document.createElement("select");
    select.name = head;
    select.append(new Option("all", ""));
    for (const value of [...new Set(rows.map(row => said(row, head)))].sort()) select.append(new Option(value));
    label.append(`${head} `, select);
    bar.append(label);
    return [head, select];
  });

  function apply() {
    for (const row of rows) row.hidden = asked.some(([head, select]) => select.value && said(row, head) !== select.value);
    const left = rows.filter(row => !row.hidden);
    // A statement has a row for each claim, cause and verdict; all of them link to the same place.
    const statements = new Set(left.map(row => row.querySelector("a").hash));
    shown.textContent = `${statements.size} statements, ${left.length} of ${rows.length} rows`;
  }

  bar.addEventListener("change", apply);
  bar.addEventListener("submit", event => event.preventDefault());
  bar.append(shown);
  (table.closest(".md-typeset__scrollwrap") ?? table).before(bar);
  apply();
}

const claims = document.querySelector(".claims table");
if (claims) filterClaims(claims);
