// SPDX-License-Identifier: Apache-2.0
// The script of the page that vha_inspect writes.
#pragma once

#include <string_view>

namespace inspect {

/// Draws what page.hpp has places for, and then says on <html>, in data-drawn, how many plots it drew.
inline constexpr std::string_view page_script = R"js('use strict';
const root = document.documentElement;
const maps = JSON.parse(document.getElementById('maps').textContent);
const at = (id) => document.getElementById(id);
const make = (name, attributes = {}, ...children) => {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.append(...children);
  return element;
};
const shown = (value) => {
  if (value === null) return 'singular';
  const size = Math.abs(value), rounded = Number(value.toPrecision(4));
  const isPlain = size === 0 || (size >= 1e-3 && size < 1e5);
  return (isPlain ? String(rounded) : rounded.toExponential()).replaceAll('-', '−');
};
const dashes = ['', '7 3', '2 3', '9 3 2 3', '4 2', '12 4', '2 2 7 2', '1 4'];
const style = (k) => `stroke="var(--s${k % 8})" stroke-dasharray="${dashes[(k + (k >> 3)) % 8]}"`;

// Curves: in each, for every line one value of each place along the axis below.
const layers = maps.inspected_layers;
const groupNames = maps.premix ? maps.premix[0].groups.map((_, group) => `group ${group}`) : [];
const perGroup = (key) => groupNames.map((name, group) => ({
  name, values: maps.premix.map((layer) => layer.groups[group][key]),
}));
const perLayer = (name, key, factor = 1) => [
  {name, values: maps.postmix.map((layer) => factor * layer[key])},
];
const charts = [];
if (maps.premix) {
  charts.push(
    {title: 'Premix: distance from identity', axis: '‖P − I‖', lines: perGroup('distance_from_identity')},
    {title: 'Premix: distance from rotation', axis: '‖P − R‖', lines: perGroup('distance_from_rotation')},
    {title: 'Premix: condition number', axis: 'σ₁ / σₙ', lines: perGroup('condition_number'), from: 1});
  if (maps.kv_heads > 1) {
    charts.push({title: 'Premix: distance between groups', axis: 'mean ‖P − P′‖', lines: groupNames.map((name, group) => ({
      name,
      // Its distance from itself is 0 and counts in the sum for nothing.
      values: maps.premix.map((layer) => layer.distances_between_groups[group].reduce((sum, value) => sum + value, 0) / (maps.kv_heads - 1)),
    })), note: 'From a group’s map to those of the layer’s other groups, on average.'});
  }
}
const fullRank = maps.postmix_rank >= maps.query_heads
  ? `A rank of ${maps.query_heads} or more is full rank for ${maps.query_heads} heads: M can be any matrix.` : '';
if (maps.postmix) {
  charts.push(
    {title: 'Postmix: share across groups', axis: '% of ‖M − I‖²', lines: perLayer('M − I', 'cross_group_share', 100), to: 100},
    {title: 'Postmix: effective rank', axis: `rank, of ${Math.min(maps.postmix_rank, maps.query_heads)}`,
     lines: perLayer('M − I', 'effective_rank'), note: fullRank});
}

const linearTicks = (low, high) => {
  const rough = (high - low) / 4, power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 5, 10].find((k) => k * power >= rough * 0.999);
  const ticks = [];
  const first = Math.floor(low / step + 1e-9), last = Math.ceil(high / step - 1e-9);
  for (let k = first; k <= last; ++k) ticks.push(k * step);
  return ticks;
};
const drawChart = (chart) => {
  const {lines, place, below = 'layer', labels = layers} = chart;
  const width = Math.max(240, place.clientWidth), height = 210;
  const left = 56, right = 10, top = 12, bottom = 40;
  const values = lines.flatMap((line) => line.values).filter((value) => value !== null);
  const least = Math.min(...values), most = Math.max(...values);
  let low = chart.from ?? 0, high = chart.to ?? Math.max(low, most);
  if (!(high > low)) high = low + 1;
  // Values that lie close together are told apart only on an axis of their own.
  const isClose = !chart.to && values.length > 0 && least > low && most - least < 0.25 * (most - low);
  if (isClose) {
    const middle = (least + most) / 2, reach = Math.max(0.6 * (most - least), 0.01 * (most - low));
    [low, high] = [Math.max(low, middle - reach), middle + reach];
  }
  const isLog = low > 0 && high / low > 50;
  if (isLog) high = 10 ** Math.ceil(Math.log10(high) - 1e-9);
  let ticks;
  if (isLog) {
    const powers = Math.round(Math.log10(high / low)), every = Math.ceil(powers / 5);
    ticks = Array.from({length: Math.floor(powers / every) + 1}, (_, k) => low * 10 ** (k * every));
  } else {
    ticks = linearTicks(low, high);
    [low, high] = [ticks[0], ticks.at(-1)];
  }
  const scale = isLog ? Math.log : Number;
  const count = labels.length;
  const x = (k) => left + (width - left - right) * (count < 2 ? 0.5 : k / (count - 1));
  const y = (value) => top + (height - top - bottom) * (1 - (scale(value) - scale(low)) / (scale(high) - scale(low)));
  const parts = [];
  for (const tick of ticks) {
    parts.push(`<path d="M${left} ${y(tick)}H${width - right}" stroke="var(--grid)"/>`,
      `<text x="${left - 6}" y="${y(tick) + 4}" text-anchor="end">${shown(Number(tick.toPrecision(6)))}</text>`);
  }
  const every = Math.max(1, Math.ceil((count - 1) / Math.floor((width - left - right) / 36)));
  for (let k = 0; k < count; k += every) {
    parts.push(`<text x="${x(k)}" y="${height - bottom + 18}" text-anchor="middle">${labels[k]}</text>`);
  }
  parts.push(`<path d="M${left} ${top}V${height - bottom}H${width - right}" fill="none" stroke="var(--soft)"/>`,
    `<text x="${(left + width - right) / 2}" y="${height - 6}" text-anchor="middle">${below}</text>`,
    `<text transform="translate(12 ${(top + height - bottom) / 2}) rotate(-90)" text-anchor="middle">${chart.axis}${isLog ? ', log scale' : ''}</text>`);
  lines.forEach((line, k) => {
    let path = '', isOpen = false;
    line.values.forEach((value, at) => {
      if (value === null) { isOpen = false; return; }
      path += `${isOpen ? 'L' : 'M'}${x(at)} ${y(value)}`;
      isOpen = true;
      if (count > 64) return;
      parts.push(`<circle cx="${x(at)}" cy="${y(value)}" r="3" fill="var(--s${k % 8})"><title>${below} ${labels[at]}, ${line.name}: ${shown(value)}</title></circle>`);
    });
    parts.push(`<path class="line" d="${path}" fill="none" stroke-width="2" ${style(k)}/>`);
  });
  const range = values.length ? `from ${shown(Math.min(...values))} to ${shown(Math.max(...values))}` : 'no numbers';
  place.innerHTML = `<svg role="img" aria-label="${chart.title}, by ${below}, ${range}" viewBox="0 0 ${width} ${height}" height="${height}">${parts.join('')}</svg>`;
};

const addChart = (parent, chart) => {
  chart.place = make('div');
  parent.append(make('figure', {}, make('h3', {}, chart.title), chart.place,
    ...(chart.note ? [make('figcaption', {}, chart.note)] : [])));
};

// Heat maps.
const colour = (name) => {
  const probe = make('canvas', {width: 1, height: 1}).getContext('2d', {willReadFrequently: true});
  probe.fillStyle = getComputedStyle(root).getPropertyValue(name);
  probe.fillRect(0, 0, 1, 1);
  return probe.getImageData(0, 0, 1, 1).data;
};
const bytesOf = (text) => Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
const drawHeat = (heat) => {
  const {canvas, rows, cols, values, scale, group} = heat;
  const [negative, zero, positive] = ['--negative', '--zero', '--positive'].map(colour);
  const small = make('canvas', {width: cols, height: rows});
  const image = new ImageData(cols, rows);
  values.forEach((value, k) => {
    const part = scale === 0 ? 0 : Math.min(1, Math.abs(value) / scale), end = value < 0 ? negative : positive;
    for (let c = 0; c < 3; ++c) image.data[4 * k + c] = zero[c] + part * (end[c] - zero[c]);
    image.data[4 * k + 3] = 255;
  });
  small.getContext('2d').putImageData(image, 0, 0);
  const cell = Math.max(1, Math.round(768 / Math.max(rows, cols)));
  canvas.width = cols * cell;
  canvas.height = rows * cell;
  const context = canvas.getContext('2d', {willReadFrequently: true});
  context.imageSmoothingEnabled = false;
  context.drawImage(small, 0, 0, canvas.width, canvas.height);
  if (!group) return;
  context.fillStyle = getComputedStyle(root).getPropertyValue('--soft');
  for (let line = group; line < rows; line += group) {
    context.fillRect(0, line * cell - 2, canvas.width, 4);
    context.fillRect(line * cell - 2, 0, 4, canvas.height);
  }
};
let heats = [], spectra = [];
const addHeat = (heat) => {
  const {title, rows, cols, rowAxis, colAxis, values, scale, note} = heat;
  const most = values.reduce((most, value) => Math.max(most, Math.abs(value)), 0);
  const canvas = make('canvas', {role: 'img', 'aria-label': `${title}, ${rows} rows by ${cols} columns, largest magnitude ${shown(most)}`});
  const axis = (kind, count, name) => make('div', {class: `axis ${kind}`},
    make('span', {}, '0'), make('span', {}, name), make('span', {}, String(count - 1)));
  canvas.addEventListener('pointermove', (event) => {
    const box = canvas.getBoundingClientRect();
    const row = Math.min(rows - 1, Math.max(0, Math.floor((event.clientY - box.top) / box.height * rows)));
    const col = Math.min(cols - 1, Math.max(0, Math.floor((event.clientX - box.left) / box.width * cols)));
    at('read').textContent = `${title}, row ${row}, column ${col}: ${shown(values[row * cols + col])}`;
  });
  at('heat').append(make('figure', {},
    make('h3', {}, title),
    make('div', {class: 'heat'}, axis('rows', rows, rowAxis), canvas, axis('columns', cols, colAxis)),
    make('div', {class: 'bar', 'aria-hidden': 'true'}),
    make('div', {class: 'ends'}, make('span', {}, shown(-scale)), make('span', {}, '0'), make('span', {}, shown(scale))),
    make('figcaption', {}, note)));
  heats.push({...heat, canvas});
};
const showLayer = () => {
  const chosen = Number(at('layer').value), layer = layers[chosen], {premix, postmix} = maps.images[chosen];
  heats = [];
  spectra = [];
  at('heat').replaceChildren();
  const read = (from, image) => Array.from(bytesOf(image), (byte) => (byte - 128) / 127 * from.scale);
  premix?.images.forEach((image, group) => addHeat({
    ...premix, title: `P − I of group ${group}, layer ${layer}`, values: read(premix, image),
    rowAxis: 'physical channel', colAxis: 'virtual channel',
    note: 'All groups of a layer have one colour scale. Elements are shown to 1/127 of it.',
  }));
  if (postmix) {
    const change = read(postmix, postmix.images[0]);
    const mixing = change.map((value, k) => (k % (postmix.cols + 1) === 0 ? value + 1 : value));
    const heat = {
      ...postmix, rowAxis: 'mixed head', colAxis: 'head', group: maps.kv_heads > 1 ? maps.query_heads / maps.kv_heads : 0,
      note: maps.kv_heads > 1 ? 'Lines part the K/V groups: what is off the squares on the diagonal joins heads of two groups.' : '',
    };
    addHeat({...heat, title: `M, layer ${layer}`, values: mixing,
      scale: mixing.reduce((most, value) => Math.max(most, Math.abs(value)), 0)});
    addHeat({...heat, title: `M − I = B·Aᵀ, layer ${layer}`, values: change});
  }
  const addSpectrum = (title, lines, note) => {
    const labels = lines[0].values.map((_, k) => k + 1);
    spectra.push({title: `${title}, layer ${layer}`, axis: 'singular value', below: 'number', labels, lines, note});
    addChart(at('heat'), spectra.at(-1));
  };
  if (maps.premix) {
    addSpectrum('Singular values of P', groupNames.map((name, group) => (
      {name, values: maps.premix[chosen].groups[group].singular_values})), 'Those of a rotation are all 1.');
  }
  if (maps.postmix) {
    const values = maps.postmix[chosen].singular_values.slice(0, maps.postmix_rank);
    addSpectrum('Singular values of B·Aᵀ', [{name: 'M − I', values}], fullRank);
  }
};

// Tables.
const fill = (table, head, rows, caption) => {
  if (caption) table.append(make('caption', {class: 'soft'}, caption));
  table.append(make('thead', {}, make('tr', {}, ...head.map((name) => make('th', {scope: 'col'}, name)))),
    make('tbody', {}, ...rows.map((row) => make('tr', {}, ...row.map((cell) => make('td', {}, cell))))));
};
const fillTables = () => {
  fill(at('summary'), ['Measure', 'least', 'mean', 'most'], charts.map(({title, axis, lines}) => {
    const all = lines.flatMap((line) => line.values), values = all.filter((value) => value !== null);
    const mean = values.reduce((sum, value) => sum + value, 0) / values.length;
    const most = all.length > values.length ? null : Math.max(...values);
    return [`${title} (${axis})`, ...(values.length ? [Math.min(...values), most === null ? null : mean, most] : [null, null, null]).map(shown)];
  }));
  if (maps.premix) {
    const rows = maps.premix.flatMap(({layer, groups, ...between}) => groups.map((map, group) => {
      const toOthers = (distances) => distances[group].filter((_, other) => other !== group).map(shown).join(', ') || '–';
      return [String(layer), String(group), ...[map.distance_from_identity, map.distance_from_rotation, map.singular_values[0],
        map.singular_values.at(-1), map.condition_number].map(shown), map.nearest_rotation_is_reflection ? 'yes' : 'no',
        toOthers(between.distances_between_groups), toOthers(between.relative_distances_between_groups)];
    }));
    const table = make('table');
    fill(table, ['layer', 'group', '‖P − I‖', '‖P − R‖', 'largest σ', 'smallest σ', 'condition', 'R reflects',
      '‖P − P′‖, the others’', '‖P − P′‖ / (‖P − I‖ + ‖P′ − I‖)'], rows, 'Premix');
    at('numbers').append(table);
  }
  if (maps.postmix) {
    const table = make('table');
    fill(table, ['layer', 'across groups, %', 'effective rank', 'numerical rank', 'singular values of B·Aᵀ'],
      maps.postmix.map((mixing) => [String(mixing.layer), shown(100 * mixing.cross_group_share), shown(mixing.effective_rank),
        String(mixing.numerical_rank), mixing.singular_values.slice(0, maps.postmix_rank).map(shown).join(', ')]), 'Postmix');
    at('numbers').append(table);
  }
};

const drawAll = () => {
  const curves = [...charts, ...spectra];
  curves.forEach(drawChart);
  heats.forEach(drawHeat);
  root.dataset.drawn = `${curves.length} curves, ${heats.length} heat maps`;
};

document.title = `What the maps of ${maps.model} learned`;
at('title').textContent = document.title;
at('sizes').textContent = `${maps.layers} layers, ${maps.physical_heads} physical heads of ${maps.physical_head_dim} channels, ` +
  `${maps.query_heads} query heads of ${maps.head_dim}, ${maps.kv_heads} K/V groups` +
  (maps.postmix ? `, Postmix of rank ${maps.postmix_rank}` : ', no Postmix') +
  (layers.length < maps.layers ? `. Shown: layers ${layers.join(', ')}.` : '.');
groupNames.forEach((name, k) => {
  const item = make('li');
  item.innerHTML = `<svg viewBox="0 0 34 12" aria-hidden="true"><path d="M0 6H34" stroke-width="3" ${style(k)}/></svg>${name}`;
  at('legend').append(item);
});
charts.forEach((chart) => { addChart(at('curves'), chart); });
layers.forEach((layer, k) => { at('layer').append(make('option', {value: k}, String(layer))); });
at('layer').addEventListener('change', () => { showLayer(); drawAll(); });
fillTables();
showLayer();
drawAll();
let pending = 0;
addEventListener('resize', () => { cancelAnimationFrame(pending); pending = requestAnimationFrame(drawAll); });
matchMedia('(prefers-color-scheme: dark)').addEventListener('change', drawAll);
)js";

}  // namespace inspect
