// Values under the pointer, and two buttons. Without JavaScript the page is whole: the legend's switches are CSS.
(() => {
  const tip = document.getElementById("tip");
  const shown = (element) => getComputedStyle(element).display !== "none";
  const place = (event) => {
    tip.hidden = false;
    const box = tip.getBoundingClientRect();
    tip.style.left = `${Math.max(4, Math.min(event.clientX + 14, innerWidth - box.width - 6))}px`;
    tip.style.top = `${Math.max(4, Math.min(event.clientY + 14, innerHeight - box.height - 6))}px`;
  };
  const hide = () => {
    tip.hidden = true;
    for (const ruler of document.querySelectorAll(".ruler")) ruler.style.visibility = "";
  };
  for (const title of document.querySelectorAll(".charts title")) title.remove();
  for (const row of document.querySelectorAll("[data-tip]")) {
    row.addEventListener("pointermove", (event) => { tip.textContent = row.dataset.tip; place(event); });
    row.addEventListener("pointerleave", hide);
  }
  for (const svg of document.querySelectorAll("svg.curves")) {
    const swatches = new Map([...document.querySelectorAll(".key")].map((key) => [key.textContent.trim(), key.querySelector("svg")]));
    const series = [...svg.querySelectorAll("g[data-name]")].map((group) => ({
      group, name: group.dataset.name, steps: group.dataset.steps.split(" "),
      x: group.dataset.x.split(" ").map(Number), values: group.dataset.values.split(" "),
    }));
    const ruler = svg.querySelector(".ruler");
    const move = (event) => {
      const box = svg.getBoundingClientRect();
      const x = (event.clientX - box.left) * svg.viewBox.baseVal.width / box.width;
      const seen = series.filter((one) => shown(one.group));
      if (!seen.length) return hide();
      const all = [...new Set(seen.flatMap((one) => one.x))];
      const at = all.reduce((best, other) => Math.abs(other - x) < Math.abs(best - x) ? other : best);
      ruler.setAttribute("transform", `translate(${at} 0)`);
      ruler.style.visibility = "visible";
      tip.replaceChildren();
      for (const one of seen) {
        const index = one.x.indexOf(at);
        if (index < 0) continue;
        if (!tip.childElementCount) tip.append(Object.assign(document.createElement("div"), { textContent: `step ${one.steps[index]}` }));
        const line = document.createElement("div");
        line.append(swatches.get(one.name)?.cloneNode(true) ?? "", one.name, Object.assign(document.createElement("b"), { textContent: one.values[index] }));
        tip.append(line);
      }
      place(event);
    };
    svg.addEventListener("pointermove", move);
    svg.addEventListener("pointerdown", move);
    svg.addEventListener("pointerleave", hide);
  }
  // In Snakemake's report the menu's button lies in the corner, and the tables lie elsewhere.
  if (self !== top) {
    if (innerWidth < 800) document.body.style.paddingTop = "2.2rem";
    for (const link of document.querySelectorAll('a[href$=".csv"], a[download]')) link.replaceWith(link.getAttribute("href"));
  }
  const keys = document.querySelector(".keys");
  for (const [words, on] of [["all", true], ["none", false]]) {
    const button = Object.assign(document.createElement("button"), { type: "button", textContent: words });
    button.addEventListener("click", () => { for (const box of keys.querySelectorAll("input")) box.checked = on; });
    keys.append(button);
  }
})();
