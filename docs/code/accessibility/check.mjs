// Lighthouse's accessibility audits of the built site, at a desktop's and a phone's width, light and dark.
//
//   node check.mjs SITE [--shots FOLDER] [PAGE...]
//
// Prints a line for each page and look, each failed audit, and hosts that a page asked for. Ends with 1 where a score is
// below 95, a page is wider than its window, or another host was asked. Without pages: all but those of results/ and
// source/.
import { execFileSync } from "node:child_process";
import { createReadStream, existsSync, mkdirSync, readdirSync } from "node:fs";
import { createServer } from "node:http";
import { extname, join } from "node:path";
import { snapshot } from "lighthouse";
import puppeteer from "puppeteer-core";

const LEAST = 95;
const WIDTHS = [1440, 390];
const SCHEMES = ["light", "dark"];
const BROWSERS = ["chromium", "chromium-browser", "google-chrome", "chrome"];
const TYPES = { ".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml" };
const LEFT_OUT = /^(results|source|assets)\/|^404/;

const words = process.argv.slice(2);
const at = words.indexOf("--shots");
const shots = at < 0 ? null : words.splice(at, 2)[1];
const [site, ...asked] = words;
const found = readdirSync(site, { recursive: true }).filter(name => name.endsWith(".html")).sort();
const pages = asked.length ? asked : found.filter(name => !LEFT_OUT.test(name));

function browser() {
  for (const name of BROWSERS) {
    try {
      return execFileSync("which", [name], { encoding: "utf8" }).trim();
    } catch {}
  }
  throw new Error(`no browser here: none of ${BROWSERS.join(", ")}`);
}

const server = createServer((request, response) => {
  const path = join(site, decodeURIComponent(new URL(request.url, "http://localhost").pathname));
  response.setHeader("Content-Type", TYPES[extname(path)] ?? "application/octet-stream");
  if (existsSync(path) && extname(path)) createReadStream(path).pipe(response);
  else response.writeHead(404).end();
}).listen(0, "127.0.0.1");
await new Promise(resolve => server.once("listening", resolve));
const home = `http://127.0.0.1:${server.address().port}`;

const chrome = await puppeteer.launch({ executablePath: browser(), args: ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"], protocolTimeout: 600_000 });
const page = await chrome.newPage();
const others = new Set();
page.on("request", one => {
  if (!one.url().startsWith(home) && !one.url().startsWith("data:")) others.add(one.url());
});

let wrong = 0;
let least = 100;
for (const name of pages) {
  for (const width of WIDTHS) {
    for (const scheme of SCHEMES) {
      await page.setViewport({ width, height: width > 1000 ? 900 : 844, isMobile: width < 1000 });
      await page.emulateMediaFeatures([{ name: "prefers-color-scheme", value: scheme }]);
      await page.goto(`${home}/${name}`, { waitUntil: "load", timeout: 180_000 });
      await new Promise(resolve => setTimeout(resolve, 300));
      const wide = await page.evaluate(() => document.documentElement.scrollWidth - window.innerWidth);
      if (shots) {
        mkdirSync(shots, { recursive: true });
        await page.screenshot({ path: join(shots, `${name.replace(/\W+/g, "_")}_${width}_${scheme}.png`) });
      }
      const flags = { onlyCategories: ["accessibility"], screenEmulation: { disabled: true } };
      const { lhr } = await snapshot(page, { flags: { ...flags, formFactor: width > 1000 ? "desktop" : "mobile" } });
      const score = Math.round(lhr.categories.accessibility.score * 100);
      least = Math.min(least, score);
      if (score < LEAST || wide > 0) wrong += 1;
      console.log(`${score}  ${name}  ${width} ${scheme}${wide > 0 ? `  wider than the window by ${wide} px` : ""}`);
      for (const audit of Object.values(lhr.audits).filter(one => one.score !== null && one.score < 1)) {
        const nodes = (audit.details?.items ?? []).map(item => item.node?.snippet?.slice(0, 160)).filter(Boolean);
        console.log(`      ${audit.id} (${nodes.length}): ${nodes.slice(0, 3).join(" | ")}`);
      }
    }
  }
}
await chrome.close();
server.close();
for (const url of others) console.log(`another host: ${url}`);
console.log(`${pages.length} pages, least score ${least}, ${wrong} looks below ${LEAST} or too wide, ${others.size} hosts`);
process.exit(wrong || others.size ? 1 : 0);
