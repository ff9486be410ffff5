// The player: shows traces of the simulator, which book/traces.py has made. No library: SVG, and one clock.
"use strict";

const player = (() => {
  const here = document.currentScript.src;
  const COLORS = ["#1f77b4", "#ff7f0e", "#2ca02c", "#c4c4c4"]; // train, push, pull, wait, as in the notebooks' pictures
  const NAMES = ["local steps", "push", "pull", "waits"];
  const WORKER_COLORS = ["#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#8c564b", "#e377c2", "#bcbd22", "#17becf"];
  const SPEEDS = [1, 2, 4, 8]; // local steps a second
  const loaded = {}; // traces by the name of their file
  const state = { scheme: 0, workers: 1, window: 0, rate: 1, slowness: 0, latency: 0, speed: 1 };
  let about, root, trace, now = 0, playing = false, last = null, wanted = "";
  const part = {}; // the elements of the page that change

  // ------------------------------------------------------------------------------------------------------------------
  // Small ones

  const make = (name, attributes = {}, parent = null, text = null) => {
    const html = ["div", "label", "select", "option", "input", "button", "span", "output", "p", "code"];
    const element = html.includes(name) ? document.createElement(name) : document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
    if (text !== null) element.textContent = text;
    if (parent) parent.append(element);
    return element;
  };
  const clear = (element) => element.replaceChildren();
  const scale = (from, to, low, high) => (value) => low + ((value - from) / (to - from)) * (high - low);
  const number = (value) => (Math.abs(value) >= 100 ? value.toFixed(0) : value.toPrecision(3));

  const loss = (a, b) => {
    const { matrix, least, floor } = about.problem;
    const [u, v] = [a - least[0], b - least[1]];
    return floor + (matrix[0][0] * u * u + 2 * matrix[0][1] * u * v + matrix[1][1] * v * v) / 2;
  };

  // ------------------------------------------------------------------------------------------------------------------
  // What the reader chooses

  const scheme = () => about.schemes[state.scheme];
  const values = (name) => ({ window: scheme().windows, rate: scheme().rates, speed: SPEEDS }[name] || about.choices[name]);
  const CONTROLS = {
    workers: ["workers", (v) => v],
    slowness: ["the last worker is", (v) => (v === 1 ? "as fast" : `${v} × slower`)],
    latency: ["latency of a message", (v) => `${v} step${v === 1 ? "" : "s"}`],
    window: ["window", (v) => `${v} local step${v === 1 ? "" : "s"}`],
    rate: ["learning rate", (v) => v],
    speed: ["speed", (v) => `${v} steps/s`],
  };

  const buildControls = () => {
    const box = make("div", { class: "controls" }, root);
    const label = make("label", {}, box, "scheme");
    const select = make("select", { id: "scheme" }, label);
    about.schemes.forEach((each, i) => make("option", { value: i }, select, each.name));
    select.addEventListener("change", () => choose("scheme", Number(select.value)));
    part.scheme = select;
    for (const [name, [text]] of Object.entries(CONTROLS)) {
      const row = make("label", {}, box, text);
      part[`${name}-value`] = make("output", { for: name }, row);
      part[name] = make("input", { type: "range", id: name, min: 0, step: 1 }, row);
      part[name].addEventListener("input", () => choose(name, Number(part[name].value)));
    }
    part.rule = make("p", { class: "rule" }, root);
    const bar = make("div", { class: "bar" }, root);
    part.play = make("button", { type: "button", id: "play" }, bar);
    part.play.addEventListener("click", toggle);
    for (const [id, sign, text, way] of [["back", "◀", "one push back", -1], ["on", "▶", "one push on", 1]]) {
      make("button", { type: "button", id, title: text, "aria-label": text }, bar, sign).addEventListener("click", () => step(way));
    }
    part.time = make("input", { type: "range", id: "time", min: 0, max: about.end, step: 0.05, "aria-label": "time" }, bar);
    part.time.addEventListener("input", () => { const time = Number(part.time.value); pause(); seek(time); });
    part.clock = make("output", { id: "clock" }, bar);
    part.facts = make("div", { class: "facts", "aria-live": "off" }, root);
  };

  const choose = (name, value) => {
    state[name] = value;
    if (name === "scheme") {
      state.window = Math.min(state.window, scheme().windows.length - 1);
      state.rate = Math.min(state.rate, scheme().rates.length - 1);
    }
    showControls();
    if (name !== "speed") load();
  };

  const showControls = () => {
    part.scheme.value = state.scheme;
    for (const [name, [, text]] of Object.entries(CONTROLS)) {
      part[name].max = values(name).length - 1;
      part[name].value = state[name];
      part[name].disabled = values(name).length === 1;
      part[`${name}-value`].textContent = text(values(name)[state[name]]);
      part[name].setAttribute("aria-valuetext", text(values(name)[state[name]]));
    }
    part.rule.textContent = scheme().rule;
  };

  const key = () => [state.window, state.rate, state.slowness, state.latency].join(" ");

  const load = () => {
    wanted = `${scheme().name}-${values("workers")[state.workers]}`;
    root.dataset.wanted = `${wanted} ${key()}`;
    if (loaded[wanted]) return show();
    if (loaded[wanted] === undefined) {
      loaded[wanted] = null; // on its way
      const script = document.createElement("script");
      script.src = new URL(`traces/${wanted}.js`, here);
      document.head.append(script);
    }
  };

  const show = () => {
    const raw = loaded[wanted][key()], unit = about.unit;
    trace = {
      spans: raw.spans.map(([worker, what, start, end]) => ({ worker, what, start: start * unit, end: end * unit })),
      pushes: raw.pushes.map(([time, worker, stale, update, ...where]) => {
        const [a, b, u, v] = where.map((value) => value * unit);
        return { time: time * unit, worker, stale, update, a, b, u, v, loss: loss(a, b) };
      }),
    };
    buildPictures();
    draw();
    root.dataset.trace = `${wanted} ${key()}`;
  };

  // ------------------------------------------------------------------------------------------------------------------
  // Pictures: what does not change while a trace plays

  const svg = (name, width, height, title) => {
    clear(part[name]);
    const picture = make("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": title }, part[name]);
    return picture;
  };
  const label = (picture, title) => {
    make("rect", { width: 14 + 6.9 * title.length, height: 23, class: "paper" }, picture);
    make("text", { x: 6, y: 16, class: "title" }, picture, title);
  };

  const buildPictures = () => {
    const narrow = root.clientWidth < 560, n = values("workers")[state.workers];
    buildCluster(n, narrow ? 370 : 780, narrow);
    buildValley(370, 330);
    buildStaleness(370, 150, n);
    buildLoss(370, 150);
  };

  const LEFT = 62;
  const buildCluster = (n, width, narrow) => {
    const row = n > 4 ? 17 : 24, top = 120, height = top + n * row + 26;
    const picture = svg("cluster", width, height, "the cluster");
    label(picture, "the cluster");
    const ps = { x: width / 2, y: 38 };
    const place = (worker) => ({ x: ((worker + 0.5) * width) / n, y: 100 });
    for (let i = 0; i < n; i++) make("line", { x1: ps.x, y1: ps.y, x2: place(i).x, y2: 100, class: "link" }, picture);
    part.messages = make("g", {}, picture);
    make("rect", { x: ps.x - 34, y: ps.y - 15, width: 68, height: 28, rx: 5, class: "ps" }, picture);
    make("text", { x: ps.x, y: ps.y + 4, class: "middle light" }, picture, "ps: x̃");
    part.boxes = [];
    for (let i = 0; i < n; i++) {
      const { x, y } = place(i);
      part.boxes.push(make("rect", { x: x - 14, y: y - 12, width: 28, height: 24, rx: 5, stroke: WORKER_COLORS[i], class: "worker" }, picture));
      make("text", { x, y: y + 4, class: "middle light" }, picture, i);
    }
    part.place = place;
    part.ps = ps;
    // The rows: a stretch of time that moves with the clock
    const lanes = make("svg", { x: LEFT, y: top, width: width - LEFT - 4, height: n * row + 2, class: "lanes" }, picture);
    part.laneWidth = width - LEFT - 4;
    part.perStep = narrow ? 26 : 42;
    part.lanes = make("g", {}, lanes);
    for (let i = 0; i < n; i++) make("text", { x: LEFT - 6, y: top + i * row + row / 2 + 4, class: "end", style: `fill: ${WORKER_COLORS[i]}` }, picture, `worker ${i}`);
    for (const { worker, what, start, end } of trace.spans) {
      const attributes = { x: start * part.perStep, y: worker * row + 2, width: Math.max(0.5, (end - start) * part.perStep), height: row - 4 };
      make("rect", { ...attributes, fill: COLORS[what] }, part.lanes);
    }
    part.cursor = make("line", { y1: top - 2, y2: top + n * row + 2, class: "cursor" }, picture);
    NAMES.forEach((name, i) => {
      const x = LEFT + i * ((width - LEFT) / 4);
      make("rect", { x, y: height - 16, width: 10, height: 10, fill: COLORS[i] }, picture);
      make("text", { x: x + 14, y: height - 7, class: narrow ? "small" : "" }, picture, name);
    });
  };

  const VALLEY = "x̃ and the workers' x, over the loss";
  const buildValley = (width, height) => {
    const picture = svg("valley", width, height, VALLEY);
    const { matrix, least, start } = about.problem;
    const half = { a: 4.9, b: 4.1 }; // the same picture for all choices, so that one can compare
    const x = scale(least[0] - half.a, least[0] + half.a, 0, width), y = scale(least[1] - half.b, least[1] + half.b, height, 0);
    // An ellipse of equal loss: its axes are the eigenvectors of the matrix, in the picture's units
    const [kx, ky] = [width / (2 * half.a), height / (2 * half.b)];
    const [p, q, r] = [matrix[0][0] / kx ** 2, -matrix[0][1] / (kx * ky), matrix[1][1] / ky ** 2];
    const mean = (p + r) / 2, apart = Math.hypot((p - r) / 2, q);
    const angle = (Math.atan2(2 * q, p - r) / 2) * (180 / Math.PI);
    for (const level of [16, 8, 4, 2, 1, 0.5, 0.25, 0.125, 0.03]) {
      const [big, small] = [Math.sqrt((2 * level) / (mean - apart)), Math.sqrt((2 * level) / (mean + apart))];
      const turn = `rotate(${angle} ${x(least[0])} ${y(least[1])})`;
      make("ellipse", { cx: x(least[0]), cy: y(least[1]), rx: small, ry: big, transform: turn, class: "level" }, picture);
    }
    label(picture, VALLEY);
    make("path", { d: `M${x(least[0]) - 6},${y(least[1])}h12m-6,-6v12`, class: "cross" }, picture);
    make("circle", { cx: x(start[0]), cy: y(start[1]), r: 4, class: "start" }, picture);
    make("text", { x: x(start[0]) + 8, y: y(start[1]) - 6 }, picture, "start");
    part.walk = make("polyline", { class: "walk" }, picture);
    part.dots = Array.from({ length: values("workers")[state.workers] }, (_, i) =>
      make("circle", { r: 4.5, fill: WORKER_COLORS[i], class: "dot" }, picture));
    part.center = make("circle", { r: 6.5, class: "center" }, picture);
    part.onValley = (a, b) => [x(a), y(b)];
  };

  const buildStaleness = (width, height, n) => {
    const most = Math.max(3, ...trace.pushes.map((push) => push.stale));
    const picture = svg("staleness", width, height, "staleness of each push");
    label(picture, "staleness of each push");
    const x = scale(0, about.end, 40, width - 8), y = scale(0, most, height - 12, 32);
    axis(picture, width, height, [[0, y(0)], [most, y(most)]]);
    part.stale = trace.pushes.map((push) => {
      const dropped = push.stale < 0, color = WORKER_COLORS[push.worker];
      return make("circle", { cx: x(push.time), cy: y(Math.max(0, push.stale)), r: 3, fill: dropped ? "none" : color, stroke: color }, picture);
    });
  };

  const buildLoss = (width, height) => {
    const above = (value) => Math.log10(Math.min(100, Math.max(1e-3, value - about.problem.floor)));
    const picture = svg("loss", width, height, "loss of x̃, above the least possible");
    label(picture, "loss of x̃, above the least possible");
    const x = scale(0, about.end, 40, width - 8), y = scale(-3, 2, height - 12, 26);
    axis(picture, width, height, [["0.001", y(-3)], ["0.1", y(-1)], ["10", y(1)]]);
    const first = [x(0), y(above(loss(...about.problem.start)))];
    const points = [first, ...trace.pushes.flatMap((push, i) => {
      const before = i ? trace.pushes[i - 1].loss : loss(...about.problem.start);
      return [[x(push.time), y(above(before))], [x(push.time), y(above(push.loss))]];
    })];
    make("polyline", { points: points.join(" "), class: "all" }, picture);
    part.lossDone = (count, time) => {
      const done = points.slice(0, 1 + 2 * count);
      return [...done, [x(time), done.at(-1)[1]]].join(" ");
    };
    part.lossLine = make("polyline", { class: "done" }, picture);
  };

  const axis = (picture, width, height, marks) => {
    for (const [text, y] of marks) {
      make("line", { x1: 40, x2: width - 8, y1: y, y2: y, class: "grid" }, picture);
      make("text", { x: 35, y: y + 4, class: "end small" }, picture, text);
    }
  };

  // ------------------------------------------------------------------------------------------------------------------
  // One moment

  const count = (time) => {
    let [low, high] = [0, trace.pushes.length];
    while (low < high) {
      const middle = (low + high) >> 1;
      if (trace.pushes[middle].time <= time + 1e-9) low = middle + 1; else high = middle;
    }
    return low;
  };

  const draw = () => {
    const done = count(now), pushes = trace.pushes, n = part.boxes.length;
    const at = done ? pushes[done - 1] : { a: about.problem.start[0], b: about.problem.start[1], loss: loss(...about.problem.start), update: 0 };
    // The cluster
    const left = Math.max(0, Math.min(now * part.perStep - part.laneWidth * 0.6, about.end * part.perStep - part.laneWidth));
    part.lanes.setAttribute("transform", `translate(${-left} 0)`);
    const cursor = LEFT + now * part.perStep - left;
    part.cursor.setAttribute("x1", cursor);
    part.cursor.setAttribute("x2", cursor);
    clear(part.messages);
    part.boxes.forEach((box) => box.setAttribute("fill", "#777"));
    const doing = new Array(n).fill(null);
    for (const span of trace.spans) {
      if (span.start > now) break;
      if (span.end <= now) continue;
      if (doing[span.worker] === null || span.what === 0) doing[span.worker] = span.what;
      if (span.what === 1 || span.what === 2) {
        const way = (now - span.start) / (span.end - span.start), share = span.what === 1 ? 1 - way : way;
        const place = part.place(span.worker);
        const [cx, cy] = [part.ps.x + (place.x - part.ps.x) * share, part.ps.y + (place.y - part.ps.y) * share];
        make("circle", { cx, cy, r: 5, fill: COLORS[span.what], class: "message" }, part.messages);
      }
    }
    doing.forEach((what, i) => part.boxes[i].setAttribute("fill", what === null ? "#777" : COLORS[what]));
    // The valley
    const path = [part.onValley(...about.problem.start), ...pushes.slice(0, done).map((push) => part.onValley(push.a, push.b))];
    part.walk.setAttribute("points", path.join(" "));
    const put = (circle, [x, y]) => { circle.setAttribute("cx", x); circle.setAttribute("cy", y); };
    put(part.center, part.onValley(at.a, at.b));
    part.dots.forEach((dot, i) => {
      const own = pushes.slice(0, done).findLast((push) => push.worker === i);
      put(dot, own ? part.onValley(own.u, own.v) : part.onValley(...about.problem.start));
    });
    // Staleness and loss
    part.stale.forEach((circle, i) => circle.setAttribute("class", i < done ? "" : "future"));
    part.lossLine.setAttribute("points", part.lossDone(done, now));
    // Numbers
    const stale = pushes.slice(0, done).map((push) => push.stale).filter((value) => value >= 0);
    const mean = stale.length ? stale.reduce((a, b) => a + b) / stale.length : 0;
    const far = Math.abs(at.a) >= 100 || Math.abs(at.b) >= 100;
    const facts = { updates: at.update, "mean staleness": mean.toFixed(1), loss: far ? "diverged" : number(at.loss), "x̃": far ? "far away" : `${at.a.toFixed(2)}, ${at.b.toFixed(2)}` };
    clear(part.facts);
    for (const [name, value] of Object.entries(facts)) {
      make("output", { "data-fact": name }, make("span", {}, part.facts, `${name} `), value);
    }
    part.time.value = now;
    part.clock.textContent = `${now.toFixed(1)} of ${about.end} steps`;
    part.play.textContent = playing ? "❚❚ pause" : now >= about.end ? "↺ again" : "▶ play";
    part.play.setAttribute("aria-pressed", playing);
  };

  // ------------------------------------------------------------------------------------------------------------------
  // The clock, and the keyboard

  const seek = (time) => { now = Math.max(0, Math.min(about.end, time)); if (trace) draw(); };
  const pause = () => { playing = false; last = null; if (trace) draw(); };
  const play = () => {
    if (now >= about.end) now = 0;
    playing = true;
    last = null;
    requestAnimationFrame(tick);
  };
  const toggle = () => (playing ? pause() : play());
  const tick = (time) => {
    if (!playing) return;
    if (last !== null) now = Math.min(about.end, now + (Math.min(250, time - last) / 1000) * SPEEDS[state.speed]);
    last = time;
    if (now >= about.end) return pause();
    if (trace) draw();
    requestAnimationFrame(tick);
  };
  const step = (way) => {
    pause();
    if (!trace) return;
    const done = count(now), { pushes } = trace;
    if (way > 0) return seek(done < pushes.length ? pushes[done].time : about.end);
    const earlier = pushes.slice(0, done).findLast((push) => push.time < now - 1e-9);
    seek(earlier ? earlier.time : 0);
  };

  const onKey = (event) => {
    const { target, key } = event;
    if (event.ctrlKey || event.metaKey || event.altKey || target.isContentEditable) return;
    const inside = root.contains(target);
    if (!inside && target !== document.body) return;
    if (key === " " && target.tagName !== "BUTTON" && target.tagName !== "SELECT") toggle();
    else if ((key === "ArrowLeft" || key === "ArrowRight") && !["INPUT", "SELECT"].includes(target.tagName)) step(key === "ArrowLeft" ? -1 : 1);
    else return;
    event.preventDefault();
  };

  // ------------------------------------------------------------------------------------------------------------------

  const begin = (index) => {
    about = index;
    root = document.getElementById("player");
    clear(root);
    buildControls();
    const pictures = make("div", { class: "pictures" }, root);
    for (const name of ["cluster", "valley", "staleness", "loss"]) part[name] = make("div", { class: name }, pictures);
    showControls();
    load();
    document.addEventListener("keydown", onKey);
    let width = root.clientWidth;
    window.addEventListener("resize", () => {
      if (trace && (root.clientWidth < 560) !== (width < 560)) { buildPictures(); draw(); }
      width = root.clientWidth;
    });
  };
  const receive = ({ name, traces }) => {
    loaded[name] = traces;
    if (name === wanted) show();
  };
  return { begin, receive };
})();
