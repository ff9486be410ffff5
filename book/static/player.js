// The player: shows traces of the simulator, which book/traces.py has made. D3 (d3.min.js, https://d3js.org) draws them.
"use strict";

const player = (() => {
  const here = document.currentScript.src;
  const PARTS = ["local steps", "push", "pull", "waits"]; // in the order of the traces
  const COLORS = ["#1f77b4", "#ff7f0e", "#2ca02c", "#c4c4c4"]; // of them, as in the notebooks' pictures
  const IDLE = "#777";
  const WORKERS = ["#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#8c564b", "#e377c2", "#bcbd22", "#17becf"];
  const SPEEDS = [1, 2, 4, 8]; // local steps a second
  const MOMENT = 18.45; // of the picture of the player, see book/browser.py
  const loaded = {}; // traces by the name of their file; null while it is on its way
  const state = { scheme: 0, workers: 1, window: 0, rate: 1, slowness: 0, latency: 0, speed: 1 };
  let about, root, trace, wanted, timer = null, now = 0, narrow, panels = [];

  // ------------------------------------------------------------------------------------------------------------------
  // What the reader chooses

  const scheme = () => about.schemes[state.scheme];
  const values = (name) => ({ window: scheme().windows, rate: scheme().rates, speed: SPEEDS }[name] || about.choices[name]);
  const chosen = (name) => values(name)[state[name]];
  const steps = (value) => `${value} step${value === 1 ? "" : "s"}`;
  const CONTROLS = [
    ["workers", "workers", String],
    ["slowness", "last worker", (v) => (v === 1 ? "as fast" : `${v}× slower`)],
    ["latency", "latency", steps],
    ["window", "window", steps],
    ["rate", "learning rate", String],
    ["speed", "speed", (v) => `${v} steps/s`],
  ];

  const buildControls = () => {
    const box = root.append("div").attr("class", "controls");
    const label = box.append("label").text("scheme");
    label.append("select").attr("id", "scheme").on("change", (event) => choose("scheme", Number(event.target.value)))
      .selectAll("option").data(about.schemes).join("option").attr("value", (_, i) => i).text((each) => each.name);
    for (const [name, text] of CONTROLS) {
      const row = box.append("label").text(text);
      row.append("output").attr("for", name);
      row.append("input").attr("type", "range").attr("id", name).attr("min", 0)
        .on("input", (event) => choose(name, Number(event.target.value)));
    }
    root.append("p").attr("class", "rule");
    const bar = root.append("div").attr("class", "bar");
    bar.append("button").attr("type", "button").attr("id", "play").on("click", toggle);
    for (const [id, sign, text, way] of [["back", "◀", "one push back", -1], ["on", "▶", "one push on", 1]]) {
      bar.append("button").attr("type", "button").attr("id", id).attr("title", text).attr("aria-label", text).text(sign)
        .on("click", () => step(way));
    }
    bar.append("input").attr("type", "range").attr("id", "time").attr("min", 0).attr("max", about.end).attr("step", 0.05)
      .attr("aria-label", "time").on("input", (event) => { const time = Number(event.target.value); pause(); seek(time); });
    bar.append("output").attr("id", "clock");
    root.append("div").attr("class", "facts");
  };

  const choose = (name, value) => {
    state[name] = value;
    state.window = Math.min(state.window, scheme().windows.length - 1);
    state.rate = Math.min(state.rate, scheme().rates.length - 1);
    showControls();
    if (name !== "speed") load();
  };

  const showControls = () => {
    root.select("#scheme").property("value", state.scheme);
    for (const [name, , text] of CONTROLS) {
      const last = values(name).length - 1;
      root.select(`#${name}`).attr("max", last).property("value", state[name]).property("disabled", last === 0)
        .attr("aria-valuetext", text(chosen(name)));
      root.select(`output[for=${name}]`).text(text(chosen(name)));
    }
    root.select(".rule").text(`${scheme().name}: ${scheme().rule}`);
  };

  const key = () => [state.window, state.rate, state.slowness, state.latency].join(" ");

  const load = () => {
    wanted = `${scheme().name}-${chosen("workers")}`;
    root.attr("data-wanted", `${wanted} ${key()}`);
    if (loaded[wanted]) return show();
    if (loaded[wanted] === undefined) {
      loaded[wanted] = null;
      d3.select("head").append("script").attr("src", new URL(`traces/${wanted}.js`, here)); // a file may load scripts, no data
    }
  };

  const loss = (a, b) => {
    const { matrix: [[p, q], [, r]], least, floor } = about.problem;
    const [u, v] = [a - least[0], b - least[1]];
    return floor + (p * u * u + 2 * q * u * v + r * v * v) / 2;
  };

  const show = () => {
    const { spans, pushes } = loaded[wanted][key()], { unit, problem: { start: [a, b], tests, correct } } = about;
    const begin = { time: 0, worker: null, stale: null, update: 0, a, b, loss: loss(a, b), accuracy: correct / tests };
    trace = {
      spans: spans.map(([worker, what, start, end]) => ({ worker, what, start: start * unit, end: end * unit })),
      pushes: pushes.map(([time, worker, stale, update, right, ...where]) => {
        const [a, b, u, v] = where.map((value) => value * unit);
        return { time: time * unit, worker, stale, update, accuracy: right / tests, a, b, u, v, loss: loss(a, b) };
      }),
    };
    trace.states = [begin, ...trace.pushes];
    build();
    root.attr("data-trace", `${wanted} ${key()}`);
  };

  // ------------------------------------------------------------------------------------------------------------------
  // Pictures. Each function draws what does not change while a trace plays, and returns a function that draws a moment:
  // {done: the number of pushes until now, at: the state after them}

  const isNarrow = () => root.node().clientWidth < 560 || root.classed("strip") || root.classed("compact");
  const build = () => {
    narrow = isNarrow();
    const charts = [
      ["cluster", cluster, narrow ? 370 : 780, 120 + laneHeight() * chosen("workers") + 22],
      ["valley", valley, 370, 330],
      ["staleness", staleness, 370, 104],
      ["loss", lossCurve, 370, 104],
      ["accuracy", accuracyCurve, 370, 104],
    ];
    panels = charts.map(([name, paint, width, height]) => {
      const box = root.select(`.pictures .${name}`);
      box.selectAll("*").remove();
      return paint(box.append("svg").attr("viewBox", `0 0 ${width} ${height}`).attr("role", "img"), width, height);
    });
    draw();
  };

  const titled = (picture, title) => {
    picture.attr("aria-label", title);
    picture.append("rect").attr("class", "paper").attr("width", 12 + 6.9 * title.length).attr("height", 21);
    picture.append("text").attr("class", "title").attr("x", 6).attr("y", 15).text(title);
  };

  const laneHeight = () => (chosen("workers") > 4 ? 16 : 20);

  const cluster = (picture, width, height) => {
    titled(picture, "the cluster");
    const n = chosen("workers"), lane = laneHeight(), top = 120, left = 62, room = width - left - 4;
    const each = d3.range(n), ps = [width / 2, 36], place = d3.scalePoint(each, [0, width]).padding(0.5);
    const path = (worker) => d3.interpolate([place(worker), 98], ps);
    picture.append("g").attr("class", "links").selectAll("line").data(each).join("line")
      .attr("x1", ps[0]).attr("y1", ps[1]).attr("x2", place).attr("y2", 98);
    const messages = picture.append("g");
    picture.append("rect").attr("class", "ps").attr("x", ps[0] - 34).attr("y", ps[1] - 15).attr("width", 68)
      .attr("height", 28).attr("rx", 5);
    picture.append("text").attr("class", "middle light").attr("x", ps[0]).attr("y", ps[1] + 4).text("ps: x̃");
    const boxes = picture.append("g").attr("class", "workers").selectAll("rect").data(each).join("rect")
      .attr("x", (i) => place(i) - 14).attr("y", 86).attr("width", 28).attr("height", 24).attr("rx", 5)
      .attr("stroke", (i) => WORKERS[i]);
    picture.append("g").selectAll("text").data(each).join("text").attr("class", "middle light").attr("x", place)
      .attr("y", 102).text(String);
    // The rows: a stretch of time that moves with the clock
    const row = d3.scaleBand(each, [top, top + n * lane]).paddingInner(0.15);
    picture.append("g").selectAll("text").data(each).join("text").attr("class", "end").attr("x", left - 6)
      .attr("y", (i) => row(i) + lane / 2 + 2).style("fill", (i) => WORKERS[i]).text((i) => `worker ${i}`);
    const perStep = width < 560 ? 26 : 42, x = d3.scaleLinear([0, 1], [0, perStep]);
    const lanes = picture.append("svg").attr("class", "lanes").attr("x", left).attr("y", 0).attr("width", room)
      .attr("height", height).append("g");
    lanes.selectAll("rect").data(trace.spans).join("rect").attr("x", (s) => x(s.start)).attr("y", (s) => row(s.worker))
      .attr("width", (s) => Math.max(0.5, x(s.end - s.start))).attr("height", row.bandwidth())
      .attr("fill", (s) => COLORS[s.what]);
    const cursor = picture.append("line").attr("class", "cursor").attr("y1", top - 3).attr("y2", top + n * lane + 1);
    const legend = picture.append("g").attr("transform", `translate(${left} ${height - 15})`).selectAll("g").data(PARTS)
      .join("g")
      .attr("transform", (_, i) => `translate(${[0, 0.32, 0.53, 0.74][i] * room} 0)`);
    legend.append("rect").attr("width", 10).attr("height", 10).attr("fill", (_, i) => COLORS[i]);
    legend.append("text").attr("x", 14).attr("y", 9).text(String);
    return () => {
      const shift = Math.max(0, Math.min(x(now) - room * 0.6, x(about.end) - room));
      lanes.attr("transform", `translate(${-shift} 0)`);
      cursor.attr("x1", left + x(now) - shift).attr("x2", left + x(now) - shift);
      const going = trace.spans.filter((span) => span.start <= now && now < span.end);
      const flying = going.filter(({ what }) => what === 1 || what === 2).map(({ worker, what, start, end }) => {
        const way = (now - start) / (end - start);
        return { what, at: path(worker)(what === 1 ? way : 1 - way).slice() };
      });
      messages.selectAll("circle").data(flying).join("circle").attr("class", "message").attr("r", 5)
        .attr("cx", (m) => m.at[0]).attr("cy", (m) => m.at[1]).attr("fill", (m) => COLORS[m.what]);
      // Of what a worker does at once the first: it may train while a message of its own is on the way
      const doing = d3.rollup(going, (spans) => d3.min(spans, (span) => span.what), (span) => span.worker);
      boxes.attr("fill", (i) => COLORS[doing.get(i)] ?? IDLE);
    };
  };

  const LEVELS = [64, 32, 16, 8, 4, 2, 1, 0.5, 0.25, 0.125, 0.03]; // of the loss, above the least
  const valley = (picture, width, height) => {
    const { least, start, floor } = about.problem, cell = 2, half = [4.9, 4.1]; // the same for all choices: one can compare
    const x = d3.scaleLinear([least[0] - half[0], least[0] + half[0]], [0, width]);
    const y = d3.scaleLinear([least[1] - half[1], least[1] + half[1]], [height, 0]);
    const [columns, rows] = [width / cell, height / cell];
    const at = (i) => loss(x.invert(((i % columns) + 0.5) * cell), y.invert((Math.floor(i / columns) + 0.5) * cell));
    // Contours are around what is above a level; the valley is what is below
    const lines = d3.contours().size([columns, rows]).thresholds(LEVELS.map((level) => -level))(
      d3.range(columns * rows).map((i) => floor - at(i)));
    picture.append("g").attr("class", "levels").selectAll("path").data(lines).join("path")
      .attr("d", d3.geoPath(d3.geoIdentity().scale(cell))); // one lies on the other, so the deepest is the darkest
    titled(picture, "x̃ and the workers' x, over the loss");
    picture.append("circle").attr("class", "start").attr("cx", x(start[0])).attr("cy", y(start[1])).attr("r", 4);
    picture.append("text").attr("x", x(start[0]) + 8).attr("y", y(start[1]) - 6).text("start");
    const walk = picture.append("path").attr("class", "walk"), line = d3.line((s) => x(s.a), (s) => y(s.b));
    const dots = picture.append("g").attr("class", "dots").selectAll("circle").data(d3.range(chosen("workers"))).join("circle")
      .attr("r", 4.5).attr("fill", (i) => WORKERS[i]);
    for (const name of ["halo", "cross"]) { // its arms are longer than the dots that reach it
      picture.append("path").attr("class", name).attr("d", "M-13 0H13M0 -13V13")
        .attr("transform", `translate(${x(least[0])} ${y(least[1])})`);
    }
    const center = picture.append("circle").attr("class", "center").attr("r", 6.5);
    return ({ done, at }) => {
      walk.attr("d", line(trace.states.slice(0, done + 1)));
      center.attr("cx", x(at.a)).attr("cy", y(at.b));
      const own = new Map(trace.pushes.slice(0, done).map((push) => [push.worker, [push.u, push.v]])); // the last of each
      dots.attr("cx", (i) => x((own.get(i) ?? start)[0])).attr("cy", (i) => y((own.get(i) ?? start)[1]));
    };
  };

  const axes = (picture, width, height, y, ticks, format = String) => {
    const x = d3.scaleLinear([0, about.end], [46, width - 8]);
    picture.append("g").attr("class", "axis").attr("transform", "translate(40 0)")
      .call(d3.axisLeft(y).tickValues(ticks).tickFormat(format).tickSize(-(width - 48)));
    picture.append("g").attr("class", "axis time").attr("transform", `translate(0 ${height - 20})`)
      .call(d3.axisBottom(x).ticks(6).tickSize(3).tickPadding(2).tickFormat((time) => (time === 0 ? "time 0" : time)));
    return x;
  };

  const staleness = (picture, width, height) => {
    const most = Math.max(3, d3.max(trace.pushes, (push) => push.stale));
    const y = d3.scaleLinear([0, most], [height - 24, 28]), x = axes(picture, width, height, y, [0, most]);
    titled(picture, "staleness of each push");
    const color = (push) => WORKERS[push.worker];
    const circles = picture.append("g").selectAll("circle").data(trace.pushes).join("circle").attr("cx", (push) => x(push.time))
      .attr("cy", (push) => y(Math.max(0, push.stale))).attr("r", 3).attr("stroke", color)
      .attr("fill", (push) => (push.stale < 0 ? "none" : color(push)));
    return ({ done }) => circles.classed("future", (_, i) => i >= done);
  };

  const curve = (picture, width, height, title, y, ticks, format, value) => {
    const x = axes(picture, width, height, y, ticks, format);
    titled(picture, title);
    const line = d3.line((s) => x(s.time), (s) => y(value(s))).curve(d3.curveStepAfter);
    picture.append("path").attr("class", "all").attr("d", line(trace.states));
    const until = picture.append("path").attr("class", "done");
    return ({ done, at }) => until.attr("d", line([...trace.states.slice(0, done + 1), { ...at, time: now }]));
  };

  const lossCurve = (picture, width, height) => {
    const y = d3.scaleLog([1e-3, 100], [height - 24, 24]).clamp(true);
    const above = (s) => Math.max(1e-3, s.loss - about.problem.floor);
    return curve(picture, width, height, "loss of x̃, above the least possible", y, [0.001, 0.1, 10], String, above);
  };

  const accuracyCurve = (picture, width, height) => {
    const y = d3.scaleLinear([0, 1], [height - 24, 28]);
    return curve(picture, width, height, "test accuracy of x̃", y, [0, 0.5, 1], d3.format(".0%"), (s) => s.accuracy);
  };

  // ------------------------------------------------------------------------------------------------------------------
  // One moment

  const count = (time) => d3.bisector((push) => push.time).right(trace.pushes, time + 1e-9);

  const draw = () => {
    const done = count(now), at = trace.states[done], far = Math.max(Math.abs(at.a), Math.abs(at.b)) >= 100;
    panels.forEach((paint) => paint({ done, at }));
    const counted = trace.pushes.slice(0, done).filter((push) => push.stale >= 0);
    const facts = [
      ["updates", at.update],
      ["mean staleness", (d3.mean(counted, (push) => push.stale) ?? 0).toFixed(1)],
      ["loss", far ? "diverged" : d3.format(at.loss < 100 ? ".3~r" : ".0f")(at.loss)],
      ["test accuracy", d3.format(".1%")(at.accuracy)],
      ["x̃", far ? "far away" : `${at.a.toFixed(2)}, ${at.b.toFixed(2)}`],
    ];
    const fact = root.select(".facts").selectAll("span").data(facts).join((enter) => {
      const span = enter.append("span").text(([name]) => `${name} `);
      span.append("output").attr("data-fact", ([name]) => name);
      return span;
    });
    fact.select("output").text(([, value]) => value);
    root.select("#time").property("value", now);
    root.select("#clock").text(`${now.toFixed(1)} of ${about.end} steps`);
    root.select("#play").text(timer ? "❚❚ pause" : now >= about.end ? "↺ again" : "▶ play")
      .attr("aria-pressed", timer !== null);
  };

  // ------------------------------------------------------------------------------------------------------------------
  // The clock, and the keyboard

  const redraw = () => { if (trace) draw(); };
  const seek = (time) => { now = Math.max(0, Math.min(about.end, time)); redraw(); };
  const pause = () => { timer?.stop(); timer = null; redraw(); };
  const play = () => {
    let last = 0;
    if (now >= about.end) now = 0;
    timer = d3.timer((elapsed) => {
      const passed = Math.min(250, elapsed - last) / 1000;
      last = elapsed;
      seek(now + passed * chosen("speed"));
      if (now >= about.end) pause();
    });
    redraw();
  };
  const toggle = () => (timer ? pause() : play());
  const step = (way) => {
    pause();
    if (!trace) return;
    const later = trace.pushes[count(now)];
    const earlier = trace.pushes[d3.bisector((push) => push.time).left(trace.pushes, now - 1e-9) - 1];
    seek(way > 0 ? later?.time ?? about.end : earlier?.time ?? 0);
  };

  const onKey = (event) => {
    const { target, key } = event;
    if (event.ctrlKey || event.metaKey || event.altKey || target.isContentEditable) return;
    if (!root.node().contains(target) && (target !== document.body || root.classed("compact"))) return;
    const moves = { ArrowLeft: -1, ArrowRight: 1 }[key];
    if (key === " " && target.tagName !== "BUTTON" && target.tagName !== "SELECT") toggle();
    else if (moves && !["INPUT", "SELECT"].includes(target.tagName)) step(moves);
    else return;
    event.preventDefault();
  };

  // ------------------------------------------------------------------------------------------------------------------

  const begin = (index) => {
    about = index;
    root = d3.select("#player");
    root.selectAll("*").remove();
    if (root.classed("compact")) { // on the first page: a moment with messages on their way, as in its picture
      Object.assign(state, { slowness: 2, latency: 1 });
      now = MOMENT;
    }
    buildControls();
    root.append("div").attr("class", "pictures").selectAll("div")
      .data(["cluster", "valley", "staleness", "loss", "accuracy"]).join("div")
      .attr("class", String);
    showControls();
    load();
    document.addEventListener("keydown", onKey);
    window.addEventListener("resize", () => { if (trace && narrow !== isNarrow()) build(); });
  };
  const receive = ({ name, traces }) => {
    loaded[name] = traces;
    if (name === wanted) show();
  };
  return { begin, receive };
})();
