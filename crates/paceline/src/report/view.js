// Zoom and tooltips for the timelines. The page is complete without this: the view is the SVGs'
// viewBox, which the server has set to one steady iteration.
"use strict";
for (const figure of document.querySelectorAll(".timeline")) {
  const number = (key) => Number(figure.dataset[key]);
  const secondsPerUnit = number("unit"), least = number("min"), most = number("max");
  const first = { from: 0, to: number("to") };
  let view = { ...first };

  const plots = [...figure.querySelectorAll(".plot")].map((plot) => {
    const field = plot.querySelector(".field"), svg = field.querySelector("svg");
    const rects = [...svg.querySelectorAll("rect:not(.track):not(.veil)")].map((rect) => {
      // Our own tooltip shows this text at once; the browser's would show it again, late.
      const title = rect.querySelector("title");
      rect.note = title.textContent;
      title.remove();
      const value = (name) => Number(rect.getAttribute(name));
      return { rect, x: value("x"), y: value("y"), width: value("width"), height: value("height"), microbatch: rect.dataset.m };
    });
    const ops = new Map(rects.filter((r) => r.rect.dataset.op).map((r) => [r.rect.dataset.op, r]));
    const height = svg.viewBox.baseVal.height;
    return { plot, field, svg, rects, ops, height, labels: field.querySelector(".labels"), axis: plot.querySelector(".axis") };
  });

  // Three significant digits with the unit that fits, as the rest of the page writes times.
  function time(seconds) {
    const size = Math.abs(seconds);
    const [factor, unit] = size === 0 || size >= 1 ? [1, "s"] : size >= 1e-3 ? [1e3, "ms"] : size >= 1e-6 ? [1e6, "µs"] : [1e9, "ns"];
    const value = seconds * factor;
    return value.toFixed(Math.abs(value) >= 100 ? 0 : Math.abs(value) >= 10 ? 1 : 2).replace("-", "−") + " " + unit;
  }

  // Ticks at round times, all in one unit and with as many digits as their distance needs.
  function ticks() {
    const from = view.from * secondsPerUnit, to = view.to * secondsPerUnit;
    const raw = (to - from) / 8, magnitude = 10 ** Math.floor(Math.log10(raw));
    const step = [1, 2, 5, 10].map((m) => m * magnitude).find((s) => s >= raw * 0.999);
    const size = Math.max(Math.abs(from), Math.abs(to));
    const [factor, unit] = size >= 1 ? [1, "s"] : size >= 1e-3 ? [1e3, "ms"] : size >= 1e-6 ? [1e6, "µs"] : [1e9, "ns"];
    const digits = Math.max(0, -Math.floor(Math.log10(step * factor) + 1e-9));
    const out = [];
    for (let i = Math.ceil(from / step); i * step <= from + 0.96 * (to - from); i++) {
      out.push({ at: (i * step - from) / (to - from), text: (i * step * factor).toFixed(digits).replace("-", "−") + " " + unit });
    }
    return out;
  }

  function element(tag, className, text) {
    const made = document.createElement(tag);
    made.className = className;
    made.textContent = text;
    return made;
  }

  function draw() {
    const range = view.to - view.from, marks = ticks();
    for (const { field, svg, rects, height, labels, axis } of plots) {
      svg.setAttribute("viewBox", `${view.from} 0 ${range} ${height}`);
      axis.replaceChildren(...marks.map((mark) => {
        const tick = element("span", "", mark.text);
        tick.style.left = 100 * mark.at + "%";
        return tick;
      }));
      const narrowest = (13 / field.clientWidth) * range;
      const shown = rects.filter((r) => r.microbatch !== undefined && r.width >= narrowest && r.x < view.to && r.x + r.width > view.from);
      labels.replaceChildren(...shown.map((r) => {
        const label = element("i", "", r.microbatch);
        const from = Math.max(r.x, view.from), to = Math.min(r.x + r.width, view.to);
        label.style.cssText = `left:${(100 * (from - view.from)) / range}%;width:${(100 * (to - from)) / range}%;top:${r.y}px;line-height:${r.height}px`;
        return label;
      }));
    }
  }

  let pending = false;
  function show(from, to) {
    const range = Math.min(Math.max(to - from, first.to * 1e-6), most - least);
    const start = Math.min(Math.max(from, least), most - range);
    view = { from: start, to: start + range };
    if (!pending) {
      pending = true;
      requestAnimationFrame(() => { pending = false; draw(); });
    }
  }
  function zoom(factor, at = (view.from + view.to) / 2) {
    show(at - (at - view.from) * factor, at + (view.to - at) * factor);
  }
  function move(share) {
    const by = share * (view.to - view.from);
    show(view.from + by, view.to + by);
  }
  const reset = () => show(first.from, first.to);

  const controls = element("div", "controls", "");
  const buttons = [["Zoom in", () => zoom(0.5)], ["Zoom out", () => zoom(2)], ["◀", () => move(-0.3)], ["▶", () => move(0.3)], ["One iteration", reset], ["Everything drawn", () => show(least, most)]];
  for (const [text, action] of buttons) {
    const button = element("button", "", text);
    button.type = "button";
    button.addEventListener("click", action);
    controls.append(button);
  }
  figure.querySelector(".legend").after(controls);
  figure.querySelector(".hint").hidden = false;

  figure.addEventListener("keydown", (event) => {
    const actions = { "+": () => zoom(0.5), "=": () => zoom(0.5), "-": () => zoom(2), ArrowLeft: () => move(-0.15), ArrowRight: () => move(0.15), Escape: reset, 0: reset };
    const action = actions[event.key];
    if (action && !event.ctrlKey && !event.metaKey) {
      event.preventDefault();
      action();
    }
  });

  const tip = element("div", "tip", "");
  tip.hidden = true;
  document.body.append(tip);

  // The same op in the other trace, if it is drawn there.
  function twin(rect, own) {
    const other = plots.find((p) => p.plot !== own);
    return other && rect.dataset.op ? { found: other.ops.get(rect.dataset.op), origin: other.plot.dataset.origin } : {};
  }
  function unmark() {
    tip.hidden = true;
    for (const marked of figure.querySelectorAll(".twin")) marked.classList.remove("twin");
  }
  function mark(rect, plot, event) {
    unmark();
    const [name, ...rest] = rect.note.split("\n");
    const { found, origin } = twin(rect, plot);
    if (found) {
      found.rect.classList.add("twin");
      rest.push(`${origin === "measured" ? "measured" : "predicted"}: ${time(found.width * secondsPerUnit)}`);
    }
    rect.classList.add("twin");
    tip.replaceChildren(element("b", "", name), "\n" + rest.join("\n"));
    tip.hidden = false;
    const { width, height } = tip.getBoundingClientRect();
    tip.style.left = Math.max(4, Math.min(event.clientX + 14, innerWidth - width - 4)) + "px";
    tip.style.top = (event.clientY + 18 + height > innerHeight ? event.clientY - height - 10 : event.clientY + 18) + "px";
  }

  for (const { plot, field } of plots) {
    const at = (event) => {
      const box = field.getBoundingClientRect();
      return view.from + ((event.clientX - box.left) / box.width) * (view.to - view.from);
    };
    let drag = null;
    field.addEventListener("pointerdown", (event) => {
      if (event.button !== 0) return;
      figure.focus({ preventScroll: true });
      field.setPointerCapture(event.pointerId);
      drag = { x: event.clientX, at: at(event), view, brush: null };
      event.preventDefault();
    });
    field.addEventListener("pointermove", (event) => {
      if (!drag) {
        const rect = event.target.closest("rect");
        if (rect && rect.note) mark(rect, plot, event);
        else unmark();
        return;
      }
      const box = field.getBoundingClientRect(), by = event.clientX - drag.x;
      if (event.shiftKey) {
        const moved = (by / box.width) * (drag.view.to - drag.view.from);
        show(drag.view.from - moved, drag.view.to - moved);
      } else if (drag.brush || Math.abs(by) > 4) {
        unmark();
        if (!drag.brush) field.append((drag.brush = element("div", "brush", "")));
        const left = Math.max(0, Math.min(drag.x, event.clientX) - box.left);
        drag.brush.style.left = left + "px";
        drag.brush.style.width = Math.min(box.width, Math.max(drag.x, event.clientX) - box.left) - left + "px";
      }
    });
    const finish = (event) => {
      if (!drag) return;
      const { brush, at: start } = drag;
      drag = null;
      if (!brush) return;
      brush.remove();
      if (event.type === "pointerup") show(Math.min(start, at(event)), Math.max(start, at(event)));
    };
    field.addEventListener("pointerup", finish);
    field.addEventListener("pointercancel", finish);
    field.addEventListener("pointerleave", unmark);
    field.addEventListener("dblclick", reset);
    // Without a click first, the wheel belongs to the page, which people want to scroll past.
    field.addEventListener("wheel", (event) => {
      const active = figure.contains(document.activeElement) || event.ctrlKey || event.metaKey;
      if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
        event.preventDefault();
        move(event.deltaX / field.clientWidth);
      } else if (active) {
        event.preventDefault();
        zoom(Math.exp(Math.min(Math.max(event.deltaY, -200), 200) * 0.002), at(event));
      }
    }, { passive: false });
  }
  addEventListener("resize", draw);
  draw();
}
