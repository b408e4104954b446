// What a user does with the page of a diagnosis; each function posts what it saw to the frame around the page.
const root = document.querySelector(".explorer");
const all = (name) => [...root.querySelectorAll(name)];
const one = (name) => root.querySelector(name);
const frame = () => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)));
const say = (seen) => parent.postMessage(JSON.stringify(seen), "*");
const give = (part, kind) => part.dispatchEvent(new Event(kind, { bubbles: true }));
const slide = (name, value) => {
  const input = one(`[data-set="${name}"]`);
  input.value = value;
  give(input, "input");
};
const choose = (kind, value) => {
  const input = one(`input[name="tokens-${kind}"][value="${value}"]`);
  input.checked = true;
  give(input, "input");
};
const pick = (index) => {
  one("[data-pick]").selectedIndex = index;
  give(one("[data-pick]"), "change");
};
const press = (key) => one(".tokens").dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true, cancelable: true }));
const tokens = () => all(".tokens i");
const codes = () => tokens().map((span) => Number(span.className.match(/k(\d+)/)[1]));
const at = () => tokens().findIndex((span) => span.matches(".on"));
const counts = () => Object.fromEntries(all("[data-remedy]").map((row) =>
  [row.dataset.remedy, [...row.querySelectorAll("[data-part] span")].map((span) => span.textContent)]));

async function sliders(settings) {
  const seen = [];
  for (const set of settings) {
    for (const [name, value] of Object.entries(set)) slide(name, value);
    await frame();
    const struck = {};
    for (const name of Object.keys(counts())) {
      choose("remedy", name);
      await frame();
      struck[name] = all(".tokens i.gone").length;
    }
    choose("mode", "set");
    await frame();
    seen.push({ counts: counts(), struck, set: codes(), note: one("[data-note]").hidden });
  }
  say(seen);
}

async function each() {
  const seen = [];
  for (let index = 0; index < one("[data-pick]").options.length; index++) {
    pick(index);
    await frame();
    seen.push(counts());
  }
  say(seen);
}

async function colours() {
  const seen = {};
  choose("remedy", "tis");
  for (const mode of ["delta", "probability", "weight"]) {
    choose("mode", mode);
    await frame();
    seen[mode] = codes();
  }
  seen.key = one("[data-key]").innerText;
  say(seen);
}

async function moves() {
  await frame();
  const seen = { keys: [], worst: [], scrolled: scrollY }, detail = () => one(".detail").innerText;
  tokens()[5].dispatchEvent(new PointerEvent("pointerover", { bubbles: true }));
  Object.assign(seen, { hover: detail(), stays: at() });
  one(".tokens").dispatchEvent(new PointerEvent("pointerleave"));
  seen.left = detail();
  tokens()[7].click();
  await frame();
  seen.touched = [at(), detail()];
  one(".tokens").focus();
  for (const key of ["ArrowRight", "ArrowLeft", "End", "ArrowRight", "Home", "PageDown", "ArrowUp"]) {
    press(key);
    await frame();
    seen.keys.push(at());
  }
  const top = () => tokens()[at()].getBoundingClientRect().top + one(".tokens").scrollTop, before = top();
  press("ArrowDown");
  await frame();
  seen.down = top() - before;
  seen.outline = [one("i.on"), one(".tokens")].map((part) => getComputedStyle(part).outlineStyle);
  seen.active = document.getElementById(one(".tokens").getAttribute("aria-activedescendant")).matches(".on");
  for (let n = 0; n < 2; n++) {
    one("[data-worst]").click();
    await frame();
    seen.worst.push(at());
  }
  one('[data-go="1"]').click();
  seen.next = [one("[data-pick]").selectedIndex, tokens().length];
  one('[data-go="-1"]').click();
  one('[data-go="-1"]').click();
  seen.before = one("[data-pick]").selectedIndex;
  pick(2);
  seen.third = tokens().length;
  seen.labels = all("input, select, button").every((part) => part.closest("label") || part.innerText || part.ariaLabel);
  say(seen);
}

async function smooth() {
  await frame();
  const reads = [], changed = [];
  for (const name of ["getBoundingClientRect", "getClientRects", "scrollIntoView"]) {
    const real = Element.prototype[name];
    Element.prototype[name] = function (...given) { reads.push(name); return real.apply(this, given); };
  }
  for (const name of ["offsetWidth", "offsetHeight", "offsetTop", "innerText", "clientHeight", "clientWidth", "scrollTop", "scrollHeight"]) {
    const owner = name in Element.prototype ? Element.prototype : HTMLElement.prototype;
    const real = Object.getOwnPropertyDescriptor(owner, name);
    Object.defineProperty(owner, name, { ...real, get() { reads.push(name); return real.get.call(this); } });
  }
  const style = getComputedStyle;
  window.getComputedStyle = (...given) => { reads.push("getComputedStyle"); return style(...given); };
  const watch = new MutationObserver((found) => changed.push(...found));
  watch.observe(one(".tokens"), { attributes: true, childList: true, subtree: true });
  const names = () => tokens().map((span) => span.className), before = names();
  const draw = requestAnimationFrame;
  let frames = 0;
  window.requestAnimationFrame = (...given) => { frames++; return draw(...given); };
  for (let n = 0; n < 20; n++) slide("rho", -13 + n / 2);
  window.requestAnimationFrame = draw;
  await null;
  const queued = changed.length;
  await frame();
  const after = names(), first = changed.length;
  slide("veto", -4);
  await frame();
  const kinds = [...new Set(changed.map((change) => `${change.type} ${change.attributeName}`))];
  const other = after.filter((name, i) => name !== before[i]).length;
  say({ reads, frames, first, other, queued, kinds, idle: changed.length - first, count: after.length });
}

async function hostile() {
  await frame();
  choose("mode", "weight");
  press("End");
  await frame();
  const tags = [...new Set([...document.body.querySelectorAll("*")].map((part) => part.tagName))];
  const texts = { first: tokens()[0].textContent, whole: one(".whole pre").textContent, title: document.title };
  say({ ...texts, tags, alerted: window.alerted ?? null, option: one("option").textContent });
}

async function fits() {
  await frame();
  for (const part of document.querySelectorAll("details")) part.open = true;
  const size = (part) => parseFloat(getComputedStyle(part).fontSize);
  const small = [...document.querySelectorAll("p, td, th, li, dd, dt, label, figcaption, i")]
    .filter((part) => part.textContent.trim() && size(part) < 12).map((part) => part.textContent);
  const plot = document.querySelector("figure.chart svg");
  say({
    small,
    wide: document.documentElement.scrollWidth,
    type: size(plot.querySelector("text")) * plot.getBoundingClientRect().width / 360,
    first: document.querySelector(".verdict").getBoundingClientRect().bottom,
    mark: getComputedStyle(document.querySelector("figure.chart use")).fill,
  });
}

async function inside() {
  await frame();
  const fold = root.closest("details"), folded = !fold.open;
  fold.open = true;
  const responses = one("[data-pick]").options.length;
  say({ folded, responses, tokens: tokens().length, counts: counts(), wide: document.documentElement.scrollWidth });
}
