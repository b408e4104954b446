// The token explorer. Texts reach the page by textContent alone. A slider changes classes of the tokens whose colour or
// fate it changes, once a frame, and reads no layout. The formulas are those of objective/: see `remedies`.
(() => {
  const { log, exp, abs, min, max } = Math;
  const numbers = (values, length, missing) => Float64Array.from({ length }, (_, i) => values ? Number(values[i]) : missing);

  // A response's columns as numbers, with Δ = log π_train − log π_infer; NaN where a token has no two log-probs.
  const read = (given) => {
    const length = given.token.length;
    const one = { ...given, whole: given.length, length, known: {} };
    for (const name of ["sampler", "trainer", "advantage", "trainer_top", "sampler_top", "rank", "trainer_set", "sampler_set"]) {
      one[name] = numbers(given[name], length, NaN);
      one.known[name] = name in given;
    }
    one.delta = numbers(null, length, NaN);
    one.moved = numbers(null, length, NaN);
    one.sum = Number(given.rest);
    one.least = Number(given.least);
    one.sound = 0;
    for (let i = 0; i < length; i++) {
      const p = one.trainer[i], q = one.sampler[i];
      if (!Number.isFinite(p) || !Number.isFinite(q) || p > 1e-5 || q > 1e-5) continue;
      one.delta[i] = min(p, 0) - min(q, 0);
      one.moved[i] = exp(min(p, 0)) - exp(min(q, 0));
      one.sum += one.delta[i];
      one.least = min(one.least, one.delta[i]);
      one.sound++;
    }
    return one;
  };

  // min_p: a token is safe if log p ≥ log p_top + ln ρ. Where p_top is not logged it counts as 1, its upper bound.
  const unsafe = (logp, top, rho) => logp < (Number.isNaN(top) ? 0 : top) + rho;
  const outside = (one, i, set) => (unsafe(one.trainer[i], one.trainer_top[i], set.rho) ? 1 : 0) + (unsafe(one.sampler[i], one.sampler_top[i], set.rho) ? 2 : 0);
  // Each remedy: the slider that sets it, the weight that it gives to a token, and the column that it needs.
  const remedies = {
    dvp: { by: "rho", weight: (one, i, set) => outside(one, i, set) ? 0 : 1 },
    icepop: { by: "c", weight: (one, i, set) => abs(one.delta[i]) > set.logC ? 0 : exp(one.delta[i]) },
    // DPPO with total variation: masked where A pushes the probability further away from the sampler's.
    dppo: { by: "epsilon", weight: (one, i, set) => (one.advantage[i] > 0 ? one.moved[i] > set.epsilon : one.moved[i] < -set.epsilon) ? 0 : 1, needs: "advantage" },
    mis: { by: "c", weight: (one, i, set) => one.sum > set.logC ? 0 : exp(one.sum) },
    veto: { by: "veto", weight: (one, i, set) => one.least < set.logVeto ? 0 : 1 },
    tis: { by: "c", weight: (one, i, set) => min(exp(one.delta[i]), set.c) },
  };
  const can = (one, name) => !remedies[name].needs || one.known[remedies[name].needs];

  const level = (size, steps) => steps.reduce((n, step) => n + (size >= step ? 1 : 0), 0);
  const signed = (value, steps) => 4 + (value < 0 ? -1 : 1) * level(abs(value), steps);
  const STEPS = [0.01, 0.1, 0.5, 2];
  // Each mode: a token's colour from 0 to 10 (4: none, 9: out, 10: no log-probs), and the words of its colours.
  const modes = {
    delta: { code: (one, i) => signed(one.delta[i], STEPS),
      key: [[0, "Δ ≤ −2"], [1, "≤ −0.5"], [2, "≤ −0.1"], [3, "≤ −0.01"], [5, "≥ 0.01"], [6, "≥ 0.1"], [7, "≥ 0.5"], [8, "≥ 2 nats"]] },
    probability: { code: (one, i) => 4 + level(-one.trainer[i], [-log(0.9), -log(0.5), -log(0.1), -log(0.01)]),
      key: [[4, "π_train above 0.9"], [5, "≤ 0.9"], [6, "≤ 0.5"], [7, "≤ 0.1"], [8, "≤ 0.01"]] },
    set: { code: (one, i, set) => [4, 8, 0, 9][outside(one, i, set)],
      key: [[4, "safe on both sides"], [8, "outside the trainer's"], [0, "outside the sampler's"], [9, "outside both"]] },
    weight: { code: (one, i, set, name) => {
      const weight = remedies[name].weight(one, i, set);
      return weight === 0 ? 9 : signed(log(weight), [0.1, 0.4, 0.7, 2.3]);
    }, key: [[9, "weight 0"], [0, "≤ 0.1"], [1, "≤ 0.5"], [2, "≤ 0.67"], [3, "≤ 0.9"], [4, "about 1"], [5, "≥ 1.1"], [6, "≥ 1.5"], [7, "≥ 2"], [8, "≥ 10"]] },
  };

  const element = (tag, text, className = "") => Object.assign(document.createElement(tag), { textContent: text, className });
  const short = (value) => Number.isFinite(value) ? String(Number(value.toPrecision(3))) : Number.isNaN(value) ? "NaN" : value > 0 ? "∞" : "−∞";
  const seen = (text) => text === "" ? "∅" : text.replace(/\r/g, "␍").replace(/\t/g, "⇥\t").replace(/\n/g, "↵\n");

  const start = (root) => {
    const part = (name) => root.querySelector(name);
    const all = JSON.parse(part('script[type="application/json"]').textContent).map(read);
    const [pick, tokens, detail, key] = ["[data-pick]", ".tokens", ".detail", "[data-key]"].map(part);
    if (!all.length) return;
    let one = all[0], spans = [], shown = new Uint8Array(0), at = 0, over = -1, waiting = false, worst = [], next = 0;
    const set = {}, stale = new Set(Object.keys(remedies));
    const chosen = (name) => part(`input[name="${root.dataset.group}-${name}"]:checked`).value;

    const readSliders = () => {
      for (const input of root.querySelectorAll("[data-set]")) {
        const name = input.dataset.set, value = Number(input.value), before = set[name];
        set[name] = name === "c" || name === "veto" ? 10 ** value : value;
        if (set[name] === before) continue;
        for (const [remedy, { by }] of Object.entries(remedies)) if (by === name) stale.add(remedy);
        const words = name === "rho" ? `e^${String(value).replace("-", "−")} = ${exp(value).toExponential(1)}` : name === "veto" ? set[name].toExponential(1) : short(set[name]);
        part(`output[data-of="${name}"]`).textContent = words;
        input.setAttribute("aria-valuetext", words);
      }
      Object.assign(set, { logC: log(set.c), logVeto: log(set.veto) });
    };
    const dropped = (one, name) => {
      let count = 0;
      const { weight } = remedies[name];
      for (let i = 0; i < one.length; i++) if (!Number.isNaN(one.delta[i]) && weight(one, i, set) === 0) count++;
      return count;
    };
    const share = (cell, count, total) => cell.replaceChildren(`${total ? short(100 * count / total) : 0} % `, element("span", `${count.toLocaleString("en")} of ${total.toLocaleString("en")}`));
    const sum = (values) => values.reduce((a, b) => a + b, 0);
    const count = () => {
      for (const row of root.querySelectorAll("[data-remedy]")) {
        const name = row.dataset.remedy, able = all.filter((other) => can(other, name));
        if (!stale.has(name)) continue;
        const every = able.map((other) => [other, dropped(other, name)]);
        for (const [part, those] of [["here", every.filter(([other]) => other === one)], ["all", every]]) {
          const cell = row.querySelector(`[data-part="${part}"]`);
          if (those.length) share(cell, sum(those.map(([, gone]) => gone)), sum(those.map(([other]) => other.sound)));
          else cell.textContent = "no advantages";
        }
      }
      stale.clear();
    };
    // The class of a token is its colour and whether it is dropped; only classes that change are written.
    const paint = () => {
      const name = chosen("remedy"), { code } = modes[chosen("mode")], { weight } = remedies[name], able = can(one, name);
      for (let i = 0; i < one.length; i++) {
        const odd = Number.isNaN(one.delta[i]);
        const gone = !odd && able && weight(one, i, set) === 0;
        const state = (odd ? 10 : code(one, i, set, name)) + (gone ? 16 : 0) + (i === at ? 32 : 0);
        if (state === shown[i]) continue;
        shown[i] = state;
        spans[i].className = `k${state & 15}${gone ? " gone" : ""}${i === at ? " on" : ""}`;
      }
    };
    const describe = (i) => {
      const rows = [["log π_train", short(one.trainer[i])], ["log π_infer", short(one.sampler[i])],
        ["π_train", short(exp(one.trainer[i]))], ["π_infer", short(exp(one.sampler[i]))],
        ["Δ", `${short(one.delta[i])} nats`], ["ratio e^Δ", short(exp(one.delta[i]))]];
      if (one.known.rank) rows.push(["rank", short(one.rank[i])]);
      if (one.known.trainer_top) rows.push(["trainer's top p", short(exp(one.trainer_top[i]))]);
      if (one.known.sampler_top) rows.push(["sampler's top p", short(exp(one.sampler_top[i]))]);
      if (one.known.trainer_set) rows.push(["trainer's safe set", `${short(one.trainer_set[i])} tokens`]);
      if (one.known.sampler_set) rows.push(["sampler's safe set", `${short(one.sampler_set[i])} tokens`]);
      if (one.known.advantage) rows.push(["advantage", short(one.advantage[i])]);
      const by = Number.isNaN(one.delta[i]) ? [] : Object.keys(remedies).filter((name) => can(one, name) && remedies[name].weight(one, i, set) === 0);
      rows.push(["dropped by", by.join(", ") || "none"], ["weight", Number.isNaN(one.delta[i]) || !can(one, chosen("remedy")) ? "" : short(remedies[chosen("remedy")].weight(one, i, set))]);
      const list = document.createElement("dl");
      for (const [name, value] of rows) list.append(element("dt", name), element("dd", value));
      const id = one.token[i] < 0 ? "" : `, id ${one.token[i]}`;
      detail.replaceChildren(element("p", one.texts[i] === undefined ? "" : seen(one.texts[i]), "token"), element("div", `token ${one.begin + i}${id}`, "note"), list);
    };
    const update = () => {
      waiting = false;
      readSliders();
      count();
      paint();
      describe(over < 0 ? at : over);
    };
    const soon = () => {
      if (waiting) return;
      waiting = true;
      requestAnimationFrame(update);
    };
    const colours = () => {
      const mode = modes[chosen("mode")];
      key.replaceChildren(...[...mode.key, [10, "no log-probs"]].map(([code, words]) => element("span", words, `k${code}`)));
      soon();
    };
    const select = (to) => {
      const before = spans[at];
      before?.removeAttribute("id");
      before?.setAttribute("aria-selected", "false");
      at = min(max(to, 0), one.length - 1);
      spans[at].id = `${root.dataset.group}-active`;
      spans[at].setAttribute("aria-selected", "true");
      tokens.setAttribute("aria-activedescendant", spans[at].id);
      over = -1;
      soon();
    };
    const move = (to) => {
      select(to);
      spans[at].scrollIntoView({ block: "nearest" });
    };
    // The token above or below: the nearest one of the line before or after.
    const line = (step) => {
      const from = spans[at].getBoundingClientRect(), middle = from.left + from.width / 2;
      let best = at, line = NaN;
      for (let i = at + step; i >= 0 && i < one.length; i += step) {
        const box = spans[i].getBoundingClientRect();
        if (abs(box.top - from.top) < 4) continue;
        if (Number.isNaN(line)) line = box.top;
        if (abs(box.top - line) > 4) break;
        const other = spans[best].getBoundingClientRect();
        if (best === at || abs(box.left + box.width / 2 - middle) < abs(other.left + other.width / 2 - middle)) best = i;
      }
      return best;
    };
    const open = (index) => {
      pick.selectedIndex = index;
      one = all[index];
      const texts = one.texts.length === one.length;
      tokens.classList.toggle("ids", !texts);
      spans = Array.from({ length: one.length }, (_, i) => {
        const span = element("i", texts ? seen(one.texts[i]) : one.token[i] < 0 ? "·" : String(one.token[i]));
        span.setAttribute("role", "option");
        span.place = i;
        return span;
      });
      tokens.replaceChildren(...spans);
      tokens.scrollTop = 0;
      shown = new Uint8Array(one.length).fill(255);
      worst = [...one.delta.keys()].filter((i) => !Number.isNaN(one.delta[i])).sort((i, j) => abs(one.delta[j]) - abs(one.delta[i]));
      next = 0;
      at = 0;
      for (const name of Object.keys(remedies)) stale.add(name);
      const cut = part("[data-cut]");
      cut.hidden = one.whole === one.length;
      cut.textContent = `Tokens ${one.begin} to ${one.begin + one.length - 1} of ${one.whole.toLocaleString("en")} are shown, around the largest mismatch. The others count for weights of the whole response.`;
      const whole = part(".whole");
      whole.hidden = !one.text;
      whole.querySelector("pre").textContent = one.text ?? "";
      const note = part("[data-note]"), lacks = ["trainer", "sampler"].filter((side) => !one.known[`${side}_top`]);
      note.hidden = !lacks.length;
      note.textContent = `The log has no largest probability of the ${lacks.join(" and the ")} at a position: it counts as 1, an upper bound, so DVP's safe set is at least as large as shown and DVP drops at most these tokens.`;
      select(0);
    };

    all.forEach((other) => pick.append(element("option", other.title)));
    tokens.addEventListener("pointerover", (event) => { const i = event.target.place; if (i >= 0) { over = i; describe(i); } });
    tokens.addEventListener("pointerleave", () => { over = -1; describe(at); });
    tokens.addEventListener("click", (event) => { const i = event.target.place; if (i >= 0) move(i); });
    tokens.addEventListener("keydown", (event) => {
      const to = { ArrowRight: () => at + 1, ArrowLeft: () => at - 1, ArrowDown: () => line(1), ArrowUp: () => line(-1),
        Home: () => 0, End: () => one.length - 1, PageDown: () => at + 50, PageUp: () => at - 50 }[event.key];
      if (!to) return;
      event.preventDefault();
      move(to());
    });
    root.addEventListener("input", (event) => {
      if (event.target.matches("[data-set]")) soon();
      if (event.target.matches('[type="radio"]')) colours();
    });
    pick.addEventListener("change", () => open(pick.selectedIndex));
    root.addEventListener("click", (event) => {
      const go = event.target.dataset?.go;
      if (go) open((pick.selectedIndex + Number(go) + all.length) % all.length);
      if (event.target.matches("[data-worst]") && worst.length) { move(worst[next]); next = (next + 1) % worst.length; }
    });
    colours();
    open(0);
  };
  for (const root of document.querySelectorAll(".explorer")) start(root);
})();
