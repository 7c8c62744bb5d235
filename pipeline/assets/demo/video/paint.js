// Draws a frame and what was found on it, as the server does where it burns boxes in (sinks/overlay).

const INK = "#10131a";
const PAPER = "#f5f7fa";
const TOP = 0.3;  // of an object's height
const SMALL = 4.5;  // an object lower than this many labels is small
const SMALL_LINE = 24;  // a line is not thicker than this part of a small object's height
const SMALL_FONT = [0.45, 0.75];  // of the usual size of text, smallest and largest
const COVERED = 0.02;  // of a label may lie on what it must not hide

/**
 * @param canvas - filled whole; its size in pixels is the caller's
 * @param frame - anything that can be drawn, of the canvas's shape
 * @param seen - a record's objects, points and, if there are any, outlines and windows: {objects, points, segments, looks}
 * @param color - the colour of a label
 * @param density - pixels of the canvas for one of the page
 */
export function paint(canvas, frame, seen, color, density = 1) {
  const {width, height} = canvas;
  const context = canvas.getContext("2d", {alpha: false});
  context.drawImage(frame, 0, 0, width, height);
  const unit = density * Math.max(0.8, Math.min(width, height) / density / 360) ** 0.6;
  const boxes = seen.objects.map(({label, score, track_id: id, box_norm: [x1, y1, x2, y2]}) => {
    const small = (y2 - y1) * height < SMALL * 1.5 * 13 * unit;  // as `measure` makes labels
    return {label, score, id, small, x1: x1 * width, y1: y1 * height, x2: x2 * width, y2: y2 * height};
  });
  boxes.sort((a, b) => (b.x2 - b.x1) * (b.y2 - b.y1) - (a.x2 - a.x1) * (a.y2 - a.y1));  // small ones on top
  const spots = seen.points.map(({label, score, x_norm, y_norm}) => {
    return {label, score, x: x_norm * width, y: y_norm * height};
  });
  for (const {box_norm: [x1, y1, x2, y2]} of seen.looks ?? []) {
    drawWindow(context, x1 * width, y1 * height, (x2 - x1) * width, (y2 - y1) * height, unit);
  }
  for (const box of boxes) drawBox(context, box, color(box.label), lineUnit(box, unit));
  const outlines = (seen.segments ?? []).map((one) => onCanvas(one, width, height));
  for (const outline of outlines) drawOutline(context, outline, color(outline.label), unit);
  for (const spot of spots) drawSpot(context, spot, color(spot.label), unit);
  const taken = [];  // writing comes last: nothing crosses it out
  const spared = boxes.map(toSpare);
  for (const box of boxes) writeBox(context, box, color(box.label), unit, taken, spared);
  for (const spot of spots) writeSpot(context, spot, color(spot.label), unit, taken);
  for (const {label, x, y} of outlines) {
    const chip = measure(context, label, unit);
    const [place] = bestPlace(context, chip, taken, [[x, y - chip.height], [x, y]]);
    write(context, chip, color(label), taken, place);
  }
}

/** An outline's path, whose coordinates are fractions of its box, in pixels. */
function onCanvas({label, path, bbox: {x_min, y_min, x_max, y_max}}, width, height) {
  const [x, y, shape] = [x_min * width, y_min * height, new Path2D()];
  shape.addPath(new Path2D(path), new DOMMatrix([(x_max - x_min) * width, 0, 0, (y_max - y_min) * height, x, y]));
  return {label, shape, x, y};
}

/** Filled, holes by the even-odd rule, with a line around it. */
function drawOutline(context, {shape}, color, unit) {
  context.globalAlpha = 0.35;
  context.fillStyle = color;
  context.fill(shape, "evenodd");
  for (const [style, line, alpha] of [[INK, 3.6, 0.75], [color, 2, 1]]) {
    context.globalAlpha = alpha;
    context.strokeStyle = style;
    context.lineWidth = line * unit;
    context.stroke(shape);
  }
  context.globalAlpha = 1;
}

const lineUnit = ({small, y1, y2}, unit) => small ? Math.min(unit, Math.max(1, (y2 - y1) / SMALL_LINE) / 2) : unit;

function drawBox(context, {x1, y1, x2, y2}, color, unit) {
  const line = 2 * unit;
  const inset = line / 2;  // a box that touches the border keeps its whole line inside
  const {width, height} = context.canvas;
  const [left, top] = [Math.max(x1, inset), Math.max(y1, inset)];
  const [w, h] = [Math.min(x2, width - inset) - left, Math.min(y2, height - inset) - top];
  if (w <= 0 || h <= 0) return;
  context.beginPath();
  context.roundRect(left, top, w, h, Math.min(6 * unit, w / 4, h / 4));
  stroke(context, INK, line + 1.6 * unit, 0.75);
  stroke(context, color, line, 1);
}

/** A part of the frame that the model looked at again. */
function drawWindow(context, x, y, width, height, unit) {
  context.beginPath();
  context.rect(x, y, width, height);
  stroke(context, INK, 2.6 * unit, 0.5);
  context.setLineDash([6 * unit, 4 * unit]);
  stroke(context, PAPER, 1.4 * unit, 0.95);
  context.setLineDash([]);
}

function stroke(context, color, width, alpha) {
  context.globalAlpha = alpha;
  context.strokeStyle = color;
  context.lineWidth = width;
  context.stroke();
  context.globalAlpha = 1;
}

function drawSpot(context, {x, y}, color, unit) {
  for (const [radius, fill] of [[7.5, INK], [6.5, PAPER], [5, color]]) {
    context.beginPath();
    context.arc(x, y, radius * unit, 0, 2 * Math.PI);
    context.fillStyle = fill;
    context.fill();
  }
}

/** What labels must not hide: a small object, and of others the part that tells what they are, such as a head. */
const toSpare = ({x1, y1, x2, y2, small}) => [x1, y1, x2, small ? y2 : y1 + TOP * (y2 - y1)];

/** Write what there is room for: all, or less, or of a small object nothing. */
function writeBox(context, {label, score, id, small, x1, y1, x2, y2}, color, unit, taken, spared) {
  const gap = 2 * unit;
  const inside = 4 * unit;
  const words = [label, ...(id == null ? [] : [String(id)])];
  if (!small) words.unshift(`${label} ${Math.round(100 * score)}%`);
  const share = (y2 - y1) / (3 * 1.5 * 13 * unit);
  const scale = small ? Math.min(Math.max(share, SMALL_FONT[0]), SMALL_FONT[1]) : 1;
  for (const [number, text] of words.entries()) {
    const chip = measure(context, text, unit * scale);
    const [place, covered] = bestPlace(context, chip, taken, [
      [x1 - gap, y1 - chip.height - gap],
      [x2 + gap - chip.width, y1 - chip.height - gap],
      [x1 - gap, y2 + gap],
      [x2 + gap, y1],
      [x1 - gap - chip.width, y1],
      [x1 + inside, y2 - inside - chip.height],
      [x1 + inside, y1 + inside],
      [x2 - inside - chip.width, y1 + inside],
    ], spared);
    if (covered <= COVERED || (number === words.length - 1 && !small)) {
      write(context, chip, color, taken, place);
      return;
    }
  }
}

function writeSpot(context, {label, score, x, y}, color, unit, taken) {
  const chip = measure(context, `${label} ${Math.round(100 * score)}%`, unit);
  const away = 10 * unit;
  const [place] = bestPlace(context, chip, taken, [
    [x + away, y - chip.height / 2],
    [x - away - chip.width, y - chip.height / 2],
    [x - chip.width / 2, y - away - chip.height],
    [x - chip.width / 2, y + away],
  ]);
  write(context, chip, color, taken, place);
}

function measure(context, text, unit) {
  const size = 13 * unit;
  const font = `600 ${size}px system-ui, sans-serif`;
  context.font = font;
  return {text, font, size, width: context.measureText(text).width + 0.9 * size, height: 1.5 * size};
}

/** The first of the places that cover least, and how much that is as a share of the label; `spared` weighs half. */
function bestPlace(context, {width, height}, taken, places, spared = []) {
  const most = context.canvas;
  const common = (from, to, other, end) => Math.max(0, Math.min(to, end) - Math.max(from, other));
  const covered = ([x, y]) => {
    const inside = common(x, x + width, 0, most.width) * common(y, y + height, 0, most.height);
    const shared = ([x1, y1, x2, y2]) => common(x, x + width, x1, x2) * common(y, y + height, y1, y2);
    const sum = (areas) => areas.reduce((total, area) => total + shared(area), 0);
    return Math.round(width * height - inside + sum(taken) + sum(spared) / 2);
  };
  const costs = places.map(covered);
  const least = Math.min(...costs);
  return [places[costs.indexOf(least)], least / (width * height)];
}

function write(context, {text, font, size, width, height}, color, taken, [left, top]) {
  const x = Math.max(0, Math.min(left, context.canvas.width - width));
  const y = Math.max(0, Math.min(top, context.canvas.height - height));
  taken.push([x, y, x + width, y + height]);
  context.beginPath();
  context.roundRect(x, y, width, height, 0.32 * size);
  context.fillStyle = color;
  context.fill();
  context.fillStyle = INK;
  context.font = font;
  context.textBaseline = "middle";
  context.fillText(text, x + 0.45 * size, y + height / 2 + 0.04 * size);
}
