"use strict";
(() => {
  const tip = document.getElementById("tip");
  const SIZES = [[2 ** 40, "TiB"], [2 ** 30, "GiB"], [2 ** 20, "MiB"], [2 ** 10, "KiB"], [1, "B"]];
  const plain = (v, digits) => v.toLocaleString("en", { maximumFractionDigits: digits });
  function said(v, unit) {
    if (v === null || v === undefined) return "-";
    if (unit === "bytes") {
      const [factor, name] = SIZES.find(([f]) => Math.abs(v) >= f) || SIZES[4];
      return plain(v / factor, 1) + " " + name;
    }
    if (unit === "seconds") {
      if (Math.abs(v) < 1) return plain(v * 1e3, 1) + " ms";
      if (Math.abs(v) < 100) return plain(v, 2) + " s";
      return Math.abs(v) < 6000 ? plain(v / 60, 1) + " min" : plain(v / 3600, 2) + " h";
    }
    if (unit === "share") return plain(v * 100, 1) + " %";
    if (unit === "time") return new Date(v * 1e3).toISOString().slice(0, 19).replace("T", " ");
    if (unit === "step" || unit === "position") return plain(v, 0);
    return Math.abs(v) >= 0.001 || v === 0 ? plain(v, 4) : v.toPrecision(3);
  }
  function nearest(xs, x) {
    let low = 0, high = xs.length - 1;
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (xs[middle] === null || xs[middle] < x) low = middle; else high = middle;
    }
    return x - xs[low] <= xs[high] - x ? low : high;
  }
  function line(name, value, bold) {
    const row = document.createElement("div");
    const left = document.createElement(bold ? "b" : "span");
    left.textContent = name;
    row.append(left);
    if (value !== "") {
      const right = document.createElement("span");
      right.textContent = value;
      row.append(right);
    }
    return row;
  }
  function curvesAt(data, x) {
    const main = data.curves.reduce((a, b) => (b.x.length > a.x.length ? b : a));
    const at = main.x[nearest(main.x, x)];
    const name = data.names.length ? data.names[Math.round(at)] || "" : said(at, data.x_unit);
    const head = data.x_unit === "step" ? "step " + name : data.x_name ? data.x_name + " " + name : name;
    const rows = [line(head, "", true)];
    for (const curve of data.curves) {
      const k = nearest(curve.x, at);
      const other = curve.x[k] !== at && data.x_unit === "step" ? " (step " + said(curve.x[k], "step") + ")" : "";
      rows.push(line(curve.name + other, said(curve.y[k], data.unit)));
    }
    return [at, rows];
  }
  function lanesAt(data, t) {
    const rows = [line(said(t, "seconds"), "", true)];
    for (const lane of data.lanes) {
      if (lane.depth !== null) {
        const cell = Math.min(lane.depth.length - 1, Math.floor(t / data.xs[1] * lane.depth.length));
        rows.push(line(lane.name.split(":")[0], plain(lane.depth[cell], 1) + " at once"));
        continue;
      }
      const now = [];
      for (const piece of lane.pieces) {
        for (let k = 0; k < piece.spans.length; k += 2) {
          if (piece.spans[k] <= t && t <= piece.spans[k + 1]) { now.push(piece.name); break; }
        }
      }
      rows.push(line(lane.name, now.join(", ") || "-"));
    }
    return [t, rows];
  }
  for (const plot of document.querySelectorAll("[data-plot]")) {
    const svg = plot.querySelector("svg");
    let data = null, at = null, cursor = null;
    const ready = () => {
      if (data !== null) return;
      data = JSON.parse(plot.dataset.plot);
      cursor = document.createElementNS("http://www.w3.org/2000/svg", "line");
      cursor.setAttribute("class", "cursor");
    };
    const show = (x, clientX, clientY) => {
      const [low, high] = data.xs;
      const [left, top, right, bottom] = data.box;
      const found = (data.lanes ? lanesAt : curvesAt)(data, Math.min(high, Math.max(low, x)));
      at = found[0];
      const px = left + (at - low) / (high - low) * (right - left);
      for (const [name, value] of [["x1", px], ["x2", px], ["y1", top], ["y2", bottom]]) {
        cursor.setAttribute(name, value);
      }
      svg.append(cursor);
      tip.replaceChildren(...found[1]);
      tip.hidden = false;
      const box = svg.getBoundingClientRect();
      const scale = box.width / svg.viewBox.baseVal.width;
      const x0 = clientX === undefined ? box.left + px * scale : clientX;
      const y0 = clientY === undefined ? box.top + 20 : clientY;
      const wide = tip.offsetWidth, tall = tip.offsetHeight;
      const beside = x0 + 16 + wide > innerWidth ? x0 - 16 - wide : x0 + 16;
      tip.style.left = Math.max(6, Math.min(beside, innerWidth - wide - 6)) + "px";
      tip.style.top = Math.max(6, Math.min(y0 + 14, innerHeight - tall - 6)) + "px";
    };
    const hide = () => { if (cursor) cursor.remove(); tip.hidden = true; };
    plot.addEventListener("pointermove", (event) => {
      ready();
      const box = svg.getBoundingClientRect();
      const [left, , right] = data.box;
      const px = (event.clientX - box.left) / box.width * svg.viewBox.baseVal.width;
      show(data.xs[0] + (px - left) / (right - left) * (data.xs[1] - data.xs[0]), event.clientX, event.clientY);
    });
    plot.addEventListener("pointerleave", hide);
    plot.addEventListener("blur", hide);
    plot.addEventListener("keydown", (event) => {
      const steps = { ArrowRight: 1, ArrowLeft: -1, PageDown: 10, PageUp: -10, Home: 0, End: 0 };
      if (event.key === "Escape") { hide(); return; }
      if (!(event.key in steps)) return;
      event.preventDefault();
      ready();
      const [low, high] = data.xs;
      if (event.key === "Home" || event.key === "End") { show(event.key === "Home" ? low : high); return; }
      if (data.lanes) { show((at === null ? low : at) + steps[event.key] * (high - low) / 200); return; }
      const xs = data.curves.reduce((a, b) => (b.x.length > a.x.length ? b : a)).x;
      const from = at === null ? (steps[event.key] > 0 ? -1 : xs.length) : nearest(xs, at);
      show(xs[Math.max(0, Math.min(xs.length - 1, from + steps[event.key]))]);
    });
  }
})();
