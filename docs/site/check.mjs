// The built site in a real browser: node check.mjs SITE SCREENSHOTS [PART OF A URL]. Every page at three widths, light and
// dark: nothing scrolls sideways, no Markdown is left, the console is silent, nothing comes from elsewhere, every link and
// anchor exists; axe finds nothing serious, in the narrowest light and the widest dark one; and searches find the right page.
// Chromium: CHROMIUM, else Debian's.
import { createServer } from "node:http";
import { mkdirSync, readFileSync, readdirSync, statSync } from "node:fs";
import { createRequire } from "node:module";
import path from "node:path";
import { chromium } from "playwright-core";

const [site, screens, some = ""] = process.argv.slice(2);
const axe = readFileSync(createRequire(import.meta.url).resolve("axe-core/axe.min.js"), "utf8");
const WIDTHS = [320, 820, 1440];
const SCHEMES = ["light", "dark"];
const TYPES = { ".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml", ".json": "application/json", ".png": "image/png" };
// Words, a part of the address that one of the first results has, and how many results count as the first: 3 unless told.
const SEARCHES = [
  ["NUMA", "/reference/commands/"], ["int4 vs int8", "/start/choose/"], ["serve openai", "serve/"],
  ["install", "/start/install/"], ["uninstall", "/start/install/"], ["--numa", "/reference/commands/"], ["--max-memory", "/reference/commands/"],
  ["cpu --dry-run", "/reference/commands/"], ["KTExperts", "/reference/python/", 1], ["KTMoEWrapper", "/reference/python/", 1],
  // The first result is a page, and the next its best section.
  ["port already in use", "/how-to/troubleshoot/#port-or-address-already-in-use", 2],
  ["address already in use", "/how-to/troubleshoot/#port-or-address-already-in-use", 2],
  ["out of memory", "/how-to/troubleshoot/#killed-out-of-memory-oom", 2], ["killed", "/how-to/troubleshoot/#killed-out-of-memory-oom", 2],
  ["amx", "/reference/commands/doctor/#instruction-sets-avx2-avx-512-amx", 2],
  ["avx2", "/reference/commands/doctor/#instruction-sets-avx2-avx-512-amx", 2],
  ["api key", "/how-to/serve/#api-key-authentication-of-requests", 2],
  ["ctrl-c", "/how-to/resume/#stop-with-ctrl-c-and-continue", 2], ["interrupted", "/how-to/resume/", 1],
];
const problems = [];

function files(folder) {
  return readdirSync(folder).flatMap((name) => {
    const whole = path.join(folder, name);
    return statSync(whole).isDirectory() ? files(whole) : [whole];
  });
}

const all = files(site).filter((file) => file.endsWith("index.html")).map((file) => "/" + path.relative(site, path.dirname(file)) + "/").map((url) => url.replace("//", "/")).sort();
const pages = all.filter((url) => url.includes(some));

const server = createServer((request, response) => {
  let file = path.join(site, decodeURIComponent(new URL(request.url, "http://x").pathname));
  try {
    if (statSync(file).isDirectory()) file = path.join(file, "index.html");
    response.writeHead(200, { "content-type": TYPES[path.extname(file)] ?? "application/octet-stream" });
    response.end(readFileSync(file));
  } catch {
    response.writeHead(404).end();
  }
});
await new Promise((resolve) => server.listen(0, "127.0.0.1", resolve));
const base = `http://127.0.0.1:${server.address().port}`;

const browser = await chromium.launch({ executablePath: process.env.CHROMIUM ?? "/usr/bin/chromium", args: ["--no-sandbox"] });
mkdirSync(screens, { recursive: true });
const anchors = new Map(); // page -> its ids
const links = []; // [page, target]
let looked = 0, tested = 0;
const faults = { true: 0, false: 0 }, minor = new Set();

for (const scheme of SCHEMES) {
  for (const width of WIDTHS) {
    const context = await browser.newContext({ viewport: { width, height: 900 }, colorScheme: scheme, reducedMotion: "reduce" });
    const page = await context.newPage();
    let where = "";
    const say = (what) => problems.push(`${where} (${width}, ${scheme}): ${what}`);
    page.on("console", (message) => ["error", "warning"].includes(message.type()) && say(`console: ${message.text()}`));
    page.on("pageerror", (error) => say(`error: ${error.message}`));
    page.on("request", (request) => request.url().startsWith(base) || request.url().startsWith("data:") || say(`asks for ${request.url()}`));
    page.on("response", (response) => response.status() >= 400 && say(`${response.status()} ${response.url()}`));
    for (const url of pages) {
      where = url;
      await page.goto(base + url, { waitUntil: "load" });
      looked += 1;
      const shown = await page.evaluate(() => ({
        scheme: document.body.dataset.mdColorScheme,
        over: document.documentElement.scrollWidth - document.documentElement.clientWidth,
        wide: [...document.querySelectorAll("main *")].filter((e) => e.getBoundingClientRect().right > innerWidth + 1 && !e.closest(".md-typeset__scrollwrap, pre, .md-sidebar")).map((e) => e.tagName + "." + e.className).slice(0, 3),
        raw: [...document.querySelectorAll("article p")].map((e) => { const copy = e.cloneNode(true); copy.querySelectorAll("code").forEach((c) => c.remove()); return copy.textContent; }).filter((text) => /\n\s*[-*|] |```|^\||\{\s*\.[\w-]+\s*\}/.test(text)).map((text) => text.slice(0, 60)),
        images: [...document.images].filter((e) => e.complete && !e.naturalWidth).map((e) => e.src),
      }));
      if (shown.scheme !== (scheme === "dark" ? "slate" : "default")) say(`has the colours of ${shown.scheme}`);
      if (shown.over > 0) say(`scrolls sideways by ${shown.over} px`);
      if (shown.wide.length) say(`wider than the window: ${shown.wide}`);
      if (shown.raw.length) say(`Markdown that was not understood: ${shown.raw}`);
      if (shown.images.length) say(`no image: ${shown.images}`);
      if ((scheme === "light" && width === WIDTHS[0]) || (scheme === "dark" && width === WIDTHS.at(-1))) {
        await page.evaluate(axe);
        const found = await page.evaluate(() => axe.run(document, { resultTypes: ["violations"] }));
        tested += 1;
        for (const fault of found.violations) {
          const bad = ["serious", "critical"].includes(fault.impact);
          faults[bad] += fault.nodes.length;
          if (bad) say(`axe, ${fault.impact}: ${fault.id}: ${fault.nodes.length} x, ${fault.nodes[0].html.slice(0, 120)} ${fault.nodes[0].any[0]?.message ?? ""}`);
          else minor.add(fault.id);
        }
      }
      if (scheme === "light" && width === 1440) {
        const here = await page.evaluate(() => ({
          ids: [...document.querySelectorAll("[id], a[name]")].map((e) => e.id || e.name),
          links: [...document.querySelectorAll("a[href]")].map((e) => e.href),
        }));
        anchors.set(url, new Set(here.ids));
        for (const link of here.links) if (link.startsWith(base)) links.push([url, link.slice(base.length)]);
      }
      await page.screenshot({ path: path.join(screens, `${url.replaceAll("/", "_").slice(1) || "home"}${width}-${scheme}.png`), fullPage: false });
    }
    await context.close();
  }
}

for (const [from, target] of links) {
  const [url, anchor] = decodeURIComponent(target).split("#");
  if (!all.includes(url)) {
    try {
      if (!statSync(path.join(site, url)).isFile()) throw 0;
    } catch {
      problems.push(`${from}: a link to ${target} leads nowhere`);
    }
  } else if (anchor && anchors.has(url) && !anchors.get(url).has(anchor)) problems.push(`${from}: ${target}: no such anchor`);
}

const page = await browser.newPage({ viewport: { width: 1440, height: 900 } });
await page.goto(base + "/", { waitUntil: "networkidle" });
for (const [words, expected, first = 3] of SEARCHES) {
  await page.fill(".md-search__input", "");
  await page.click(".md-search__input");
  await page.keyboard.type(words);
  await page.waitForTimeout(1000); // the results of the words before remain for a moment
  const found = await page.locator(".md-search-result__item > a.md-search-result__link").evaluateAll((all) => all.map((e) => e.href.replace(/\?h=[^#]*/, "")));  // without the words to mark
  await page.screenshot({ path: path.join(screens, `search-${words.replaceAll(" ", "-")}.png`) });
  if (process.env.SEARCHED) console.log(words, found.slice(0, 6).map((href) => href.slice(base.length)));
  if (!found.slice(0, first).some((href) => href.includes(expected))) problems.push(`the search for "${words}" does not find ${expected}, but ${found.slice(0, 3).join(", ") || "nothing"}`);
}
await browser.close();
server.close();

console.log(`${pages.length} pages, ${looked} screens at ${WIDTHS} px, ${SCHEMES}; ${links.length} links; ${SEARCHES.length} searches; axe on ${tested} screens: ${faults[true]} serious or critical faults, ${faults[false]} others (${[...minor]})`);
for (const problem of problems) console.error(problem);
process.exit(problems.length ? 1 : 0);
