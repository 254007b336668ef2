"""Pictures, clips and sounds of the demo, drawn from attributes and a seed.

What the caption names decides shape, colour, place, motion, pitch and rhythm; everything else (exact place, size and hue, the
background, noise, phase) is drawn anew for each sample, so that no two samples of one caption are alike. Pictures and clips show a
room with light from the left, a wall above and a floor below, so that a patch tells where it is the way patches of photographs do.
"""

import math

import numpy as np
import numpy.typing as npt

from treadle.launch.demo_captions import Kind

PICTURE_SIDE_PX = 64
CLIP_SIDE_PX = 32
CLIP_FRAMES = 8
CLIP_RATE_FPS = 8
SOUND_RATE_HZ = 16_000
SOUND_SAMPLES = 16_000

Pixels = npt.NDArray[np.uint8]
Samples = npt.NDArray[np.float32]
_Plane = npt.NDArray[np.float64]

COLOURS = np.array(
    [(214, 40, 40), (240, 135, 25), (238, 218, 50), (45, 160, 60), (45, 85, 215), (140, 50, 180), (18, 18, 18), (245, 245, 245)],
    dtype=np.float64,
)
"""RGB of the colours, in the order of the captions' words."""

_PLACES = (0.22, 0.5, 0.78)
_RADII = ((0.12, 0.145), (0.195, 0.235))
_PITCHES_HZ = (110.0, 205.0, 380.0, 705.0, 1310.0)
_STEPS = ((-1, 0), (1, 0), (0, -1), (0, 1))


def _polygon(x: _Plane, y: _Plane, corners: list[tuple[float, float]]) -> _Plane:
    """Signed distance to a simple polygon, negative inside (Quilez, "2D distance functions")."""
    points = np.array(corners)
    nearest = np.full(x.shape, np.inf)
    inside = np.zeros(x.shape, dtype=bool)
    for (ax, ay), (bx, by) in zip(points, np.roll(points, 1, axis=0), strict=True):
        ex, ey, wx, wy = bx - ax, by - ay, x - ax, y - ay
        along = np.clip((wx * ex + wy * ey) / (ex * ex + ey * ey), 0, 1)
        nearest = np.minimum(nearest, (wx - ex * along) ** 2 + (wy - ey * along) ** 2)
        crosses = (ay > y) != (by > y)
        inside ^= crosses & (x < ex * (y - ay) / (ey if ey else 1.0) + ax)
    distance: _Plane = np.where(inside, -1.0, 1.0) * np.sqrt(nearest)
    return distance


def _star(points: int, inner: float) -> list[tuple[float, float]]:
    turns = np.arange(2 * points) * math.pi / points - math.pi / 2
    radii = np.where(np.arange(2 * points) % 2 == 0, 1.15, inner)
    return [(float(r * math.cos(a)), float(r * math.sin(a))) for r, a in zip(radii, turns, strict=True)]


def _heart() -> list[tuple[float, float]]:
    t = np.linspace(0, 2 * math.pi, 25)[:-1]
    x = 16 * np.sin(t) ** 3
    y = -(13 * np.cos(t) - 5 * np.cos(2 * t) - 2 * np.cos(3 * t) - np.cos(4 * t))
    return [(float(a), float(b)) for a, b in zip(x / 15, y / 15, strict=True)]


_ARM = ((-0.33, 1.1), (0.33, 1.1), (0.33, 0.33), (1.1, 0.33), (1.1, -0.33), (0.33, -0.33))

_POLYGONS: dict[int, list[tuple[float, float]]] = {
    1: [(-0.88, -0.88), (0.88, -0.88), (0.88, 0.88), (-0.88, 0.88)],
    2: [(0.0, -1.1), (1.05, 0.8), (-1.05, 0.8)],
    3: [(0.0, -1.2), (0.8, 0.0), (0.0, 1.2), (-0.8, 0.0)],
    4: _star(5, 0.48),
    5: [(s * a, s * b) for s in (1, -1) for a, b in _ARM],
    7: _heart(),
}


def _cover(shape: int, side: int, centre: tuple[float, float], radius: float) -> _Plane:
    """How much of each pixel the shape covers; centre and radius in shares of the side."""
    cover = np.zeros((side, side))
    # Distances are worth their cost near the shape alone.
    reach = 1.25 * radius + 1 / side
    (left, right), (top, bottom) = ((max(0, math.floor((c - reach) * side)), max(0, math.ceil((c + reach) * side))) for c in centre)
    grid = (np.arange(side) + 0.5) / side
    x, y = np.meshgrid((grid[left:right] - centre[0]) / radius, (grid[top:bottom] - centre[1]) / radius)
    if shape == 0:
        distance = np.hypot(x, y) - 1
    elif shape == 6:
        distance = np.abs(np.hypot(x, y) - 0.82) - 0.26
    else:
        distance = _polygon(x, y, _POLYGONS[shape])
    cover[top:bottom, left:right] = np.clip(0.5 - distance * radius * side, 0, 1)
    return cover


def _ground(draw: np.random.Generator, side: int) -> _Plane:
    """A pale room, `[side, side, 3]`: a bluish wall above a brownish floor, lit from the left; tint, light and noise differ."""
    level = draw.uniform(118, 158) + draw.uniform(-8, 8, 3)
    grid = np.linspace(-1, 1, side)
    fall = draw.uniform(0.75, 1.25, 2)
    down = np.array([18.0, 2.0, -22.0]) * fall[0]
    across = np.array([-26.0, -26.0, -26.0]) * fall[1]
    ground: _Plane = level + grid[:, None, None] * down + grid[None, :, None] * across
    return ground


def _tint(draw: np.random.Generator, colour: int) -> _Plane:
    tint: _Plane = COLOURS[colour] + draw.uniform(-14, 14, 3)
    return tint


def _pixels(values: _Plane) -> Pixels:
    return np.clip(np.rint(values), 0, 255).astype(np.uint8)


def draw_picture(attributes: tuple[int, ...], draw: np.random.Generator) -> Pixels:
    """A picture of one shape: uint8 `[64, 64, 3]`."""
    shape, colour, size, place = attributes
    centre = (_PLACES[place % 3] + draw.uniform(-0.035, 0.035), _PLACES[place // 3] + draw.uniform(-0.035, 0.035))
    cover = _cover(shape, PICTURE_SIDE_PX, centre, draw.uniform(*_RADII[size]))[..., None]
    image = _ground(draw, PICTURE_SIDE_PX) * (1 - cover) + _tint(draw, colour) * cover
    return _pixels(image + draw.normal(0, 4, image.shape))


def draw_clip(attributes: tuple[int, ...], draw: np.random.Generator) -> Pixels:
    """A clip of one shape in steady motion: uint8 `[8, 32, 32, 3]`."""
    shape, colour, direction, pace = attributes
    step = (0.03, 0.09)[pace] * draw.uniform(0.9, 1.1)
    start = draw.uniform(0.4, 0.6, 2)
    ground, tint, radius = _ground(draw, CLIP_SIDE_PX), _tint(draw, colour), draw.uniform(0.25, 0.3)
    frames: list[Pixels] = []
    for number in range(CLIP_FRAMES):
        way = (number - (CLIP_FRAMES - 1) / 2) * step
        centre = (float(start[0] + way * _STEPS[direction][0]), float(start[1] + way * _STEPS[direction][1]))
        cover = _cover(shape, CLIP_SIDE_PX, centre, radius)[..., None]
        frames.append(_pixels(ground * (1 - cover) + tint * cover + draw.normal(0, 3, ground.shape)))
    return np.stack(frames)


def _voice(voice: int, phase: Samples, seconds: Samples) -> Samples:
    """A periodic wave at `phase` radians: whistle, buzz or bell."""
    if voice == 0:
        wave = np.sin(phase)
    elif voice == 1:
        wave = sum((np.sin(k * phase) / k for k in (1, 2, 3, 4, 5)), start=np.zeros_like(phase)) * 0.7
    else:
        wave = (np.sin(phase) + 0.6 * np.sin(2.76 * phase) + 0.4 * np.sin(5.4 * phase)) * np.exp(-16 * seconds) * 0.8
    return wave.astype(np.float32)


def draw_sound(attributes: tuple[int, ...], draw: np.random.Generator) -> Samples:
    """One second of beats: float32 `[16000]` in [-1, 1]."""
    voice, pitch, contour, beats, pace = attributes
    sound = draw.normal(0, 0.004, SOUND_SAMPLES).astype(np.float32)
    spread_s = (0.92, 0.6)[pace] * draw.uniform(0.96, 1.04)
    period_s = spread_s / (beats + 1)
    length_s = (0.14, 0.085)[pace] * draw.uniform(0.94, 1.06)
    base_hz = _PITCHES_HZ[pitch] * 2 ** draw.uniform(-0.12, 0.12)
    loudness = draw.uniform(0.5, 0.9)
    for beat in range(beats + 1):
        first = round((0.01 + beat * period_s) * SOUND_RATE_HZ)
        count = round(length_s * SOUND_RATE_HZ)
        seconds = (np.arange(count) / SOUND_RATE_HZ).astype(np.float32)
        glide = (0.0, 1.0, -1.0)[contour] * (seconds / seconds[-1] - 0.5) * 0.9
        phase = (np.cumsum(2 * math.pi * base_hz * 2**glide / SOUND_RATE_HZ) + draw.uniform(0, 2 * math.pi)).astype(np.float32)
        edge = np.minimum(1, np.minimum(np.arange(count), np.arange(count)[::-1]) / 120).astype(np.float32)
        room = sound[first : first + count]
        room += (loudness * edge * _voice(voice, phase, seconds))[: len(room)]
    return np.clip(sound, -1, 1)


def draw_scene(kind: Kind, attributes: tuple[int, ...], seed: int) -> Pixels | Samples:
    """The content of a scene; one seed gives one content."""
    draw = np.random.default_rng(np.random.Philox(seed))
    if kind is Kind.PICTURE:
        return draw_picture(attributes, draw)
    return draw_clip(attributes, draw) if kind is Kind.CLIP else draw_sound(attributes, draw)
