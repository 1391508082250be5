// SPDX-License-Identifier: Apache-2.0
// The page that vha_inspect writes: one file, no network. It shows `maps` of maps_json.hpp.
#pragma once

#include <string>
#include <string_view>

#include "page_script.hpp"

namespace inspect {

inline constexpr std::string_view page_head = R"html(<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy"
content="default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,">
<title>What the maps learned</title>
<style>
:root {
  color-scheme: light dark;
  --page: #fcfcfb; --card: #ffffff; --ink: #1a1a19; --soft: #57564f; --line: #dcdad2; --grid: #e9e7e0;
  --negative: #2166ac; --zero: #f4f3ef; --positive: #b2182b;
  --s0: #1f5fae; --s1: #b5460f; --s2: #1b7a4b; --s3: #7a3fa8; --s4: #8a6100; --s5: #b0256b;
  --s6: #0f7480; --s7: #5a5a55;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #161615; --card: #1f1f1d; --ink: #f1efe8; --soft: #b5b3a9; --line: #3d3c38; --grid: #2e2d2a;
    --negative: #6cb0f5; --zero: #262624; --positive: #ff8273;
    --s0: #7ab5ff; --s1: #ff9b61; --s2: #63cf97; --s3: #c99bf5; --s4: #e2bb4d; --s5: #ff8dbf;
    --s6: #5ccbd8; --s7: #b5b3a9;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0 auto; padding: 1rem; max-width: 1400px; background: var(--page); color: var(--ink);
  font: 16px/1.5 system-ui, sans-serif;
}
h1 { font-size: 1.5rem; line-height: 1.25; margin: 0.5rem 0; overflow-wrap: anywhere; }
h2 { font-size: 1.2rem; margin: 2rem 0 0.5rem; }
h3 { font-size: 1rem; margin: 0 0 0.25rem; }
p { margin: 0.25rem 0 0.75rem; max-width: 48rem; }
.soft, figcaption { color: var(--soft); font-size: 0.875rem; }
.grid { display: grid; gap: 1rem; align-items: start; grid-template-columns: repeat(auto-fill, minmax(min(100%, 320px), 1fr)); }
figure, .card {
  margin: 0; padding: 0.75rem; min-width: 0; background: var(--card); border: 1px solid var(--line);
  border-radius: 8px;
}
svg { display: block; width: 100%; overflow: visible; }
svg text { fill: var(--soft); font-size: 12px; }
canvas { display: block; width: 100%; image-rendering: pixelated; border: 1px solid var(--line); }
.heat { display: grid; grid-template-columns: auto 1fr; gap: 0.125rem 0.375rem; max-width: 420px; }
.axis { display: flex; justify-content: space-between; color: var(--soft); font-size: 0.8125rem; }
.axis.rows { writing-mode: vertical-rl; transform: rotate(180deg); flex-direction: row-reverse; }
.heat .axis.columns { grid-column: 2; }
.read { min-height: 1.5em; font-variant-numeric: tabular-nums; }
.bar { height: 14px; border: 1px solid var(--line); max-width: 420px;
  background: linear-gradient(to right, var(--negative), var(--zero), var(--positive)); }
.ends { display: flex; justify-content: space-between; max-width: 420px; font-size: 0.8125rem;
  color: var(--soft); font-variant-numeric: tabular-nums; }
.legend { display: flex; flex-wrap: wrap; gap: 0.125rem 1rem; padding: 0; margin: 0 0 0.75rem; list-style: none; }
.legend svg { display: inline-block; width: 34px; height: 12px; vertical-align: middle; margin-right: 0.25rem; }
.scroll { overflow-x: auto; }
#numbers th, #numbers td { white-space: nowrap; }
table + table { margin-top: 1rem; }
table { border-collapse: collapse; font-size: 0.875rem; font-variant-numeric: tabular-nums; }
caption { text-align: left; }
th, td { padding: 0.2rem 0.7rem 0.2rem 0; text-align: right; border-bottom: 1px solid var(--grid); }
th { color: var(--soft); font-weight: 600; vertical-align: bottom; }
th:first-child, td:first-child { text-align: left; }
.controls { display: flex; flex-wrap: wrap; gap: 0.5rem 1.5rem; align-items: center; margin: 0.5rem 0 1rem; }
select { font: inherit; padding: 0.25rem 0.5rem; min-height: 2.25rem; color: inherit;
  background: var(--card); border: 1px solid var(--soft); border-radius: 6px; }
summary { cursor: pointer; padding: 0.25rem 0; }
:focus-visible { outline: 3px solid var(--s0); outline-offset: 2px; }
</style>
</head>
<body>
<main>
<h1 id="title">What the maps learned</h1>
<p id="sizes" class="soft"></p>
<noscript><p>The plots are drawn by a script within this file, and scripts are off here.</p></noscript>
<section aria-labelledby="summary-title">
<h2 id="summary-title">Summary</h2>
<div class="card scroll" tabindex="0" role="region" aria-labelledby="summary-title"><table id="summary"></table></div>
</section>
<section aria-labelledby="curves-title">
<h2 id="curves-title">Over the layers</h2>
<p class="soft">Distances are Frobenius norms, without a unit. I is the identity, R the nearest matrix
with orthonormal columns or rows, which may include a reflection. The condition number is the largest
over the smallest singular value.</p>
<ul id="legend" class="legend" aria-label="K/V groups"></ul>
<div id="curves" class="grid"></div>
</section>
<section aria-labelledby="heat-title">
<h2 id="heat-title">One layer's maps</h2>
<div class="controls">
<label>Layer <select id="layer"></select></label>
</div>
<p id="read" class="read soft">Point at a map to read an element.</p>
<div id="heat" class="grid"></div>
</section>
<section aria-labelledby="numbers-title">
<h2 id="numbers-title">All numbers</h2>
<details><summary>Table of every layer and group</summary>
<div class="card scroll" tabindex="0" role="region" aria-labelledby="numbers-title" id="numbers"></div>
</details>
</section>
</main>
<script type="application/json" id="maps">)html";

inline constexpr std::string_view page_middle = "</script>\n<script>\n";
inline constexpr std::string_view page_end = "</script>\n</body>\n</html>\n";

/// The whole page. `maps` is JSON text in UTF-8.
inline std::string page(std::string_view maps) {
  std::string result(page_head);
  for (const char c : maps) {
    // "</script>" in a name would end the data.
    if (c == '<') {
      result += "\\u003c";
    } else {
      result += c;
    }
  }
  return (result.append(page_middle) += page_script).append(page_end);
}

}  // namespace inspect
