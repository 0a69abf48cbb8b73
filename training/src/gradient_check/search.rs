//! The search for gradients that are wrong: in groups of parameters first, then by halves.

use std::ops::Range;

use candle_core::DType;
use ops::RouteRecord;

use super::changes::{Change, Direction, KeptVars, hash, numbers};
use super::{CheckedLoss, CheckedPart};
use crate::{Error, GradientCheck, LostGradient};

/// Distances of elements, relative to the root mean square of their parameter. What has a gradient is compared along a small
/// distance first; what has none is moved far first, because what does not matter then does not matter at all.
const SMALL_FIRST: [f64; 2] = [0.01, 0.1];
const LARGE_FIRST: [f64; 3] = [1.0, 0.1, 0.01];
/// The second distance of a suspicion is so much smaller: along it, what is lost is smaller by this factor, and the bend of a
/// loss, or a unit that was switched on, by more.
const CLOSER: f64 = 8.0;
/// A distance at which nothing but rounding changes.
const TINY: f64 = 1e-6;
/// Root mean square that is assumed for a parameter of zeros.
const OF_ZEROS: f64 = 0.1;
/// Tolerated difference, relative to what a gradient of this norm makes of a random direction.
const TOLERANCE: f64 = 0.1;
/// What counts as more than noise, in units of the noise.
const CLEAR: f64 = 10.0;
/// Relative difference of two passes with the same parameters above which they do not compute the same.
const REPEATABLE: f64 = 1e-5;
/// Number of places that are searched for.
const MOST_NAMED: usize = 5;
/// How often the rows of a parameter are halved.
const HALVINGS: usize = 4;

/// A parameter of all ranks.
struct Parameter {
    name: String,
    hash: u64,
    rows: usize,
    row_len: usize,
    /// Sum of squares of the gradient, for each row.
    squares: Vec<f64>,
    /// Root mean square of its elements.
    size: f64,
    /// Whether its numbers are too coarse to be changed a little.
    is_narrow: bool,
}

/// Some rows of a parameter.
#[derive(Debug, Clone)]
struct Block {
    parameter: usize,
    rows: Vec<Range<usize>>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Verdict {
    Agrees,
    Lost,
    Unknown,
}

/// The change of the loss between both ways along a direction.
struct Difference {
    measured: f64,
    predicted: f64,
    /// Whether the loss changed at all, on either way.
    changed: bool,
}

impl Difference {
    fn gap(&self) -> f64 {
        self.measured - self.predicted
    }
}

pub(super) struct Search<'a, L> {
    loss: &'a mut L,
    parts: Vec<CheckedPart>,
    parameters: Vec<Parameter>,
    start: f64,
    noise: f64,
    passes: usize,
    most_passes: usize,
    /// The experts that the unchanged parameters choose: gradients are those of these choices.
    routes: RouteRecord,
}

impl<'a, L: CheckedLoss> Search<'a, L> {
    /// Prepares the search: norms of parameters and gradients, and the loss's noise.
    pub(super) fn begin(
        loss: &'a mut L,
        parameters: &[(String, Vec<usize>)],
        parts: Vec<CheckedPart>,
        most_passes: usize,
    ) -> Result<Self, L::Error> {
        let described = parameters.iter().enumerate();
        let described = described.map(|(index, (name, dims))| describe(loss, index, name, dims, &parts));
        let parameters = described.collect::<Result<_, _>>()?;
        let mut search = Self {
            loss,
            parts,
            parameters,
            start: 0.0,
            noise: 0.0,
            passes: 0,
            most_passes,
            routes: RouteRecord::default(),
        };
        let (first, second) = (search.pass()?, search.pass()?);
        if (first - second).abs() > REPEATABLE * first.abs() {
            return Err(Error::NotRepeatable { first, second }.into());
        }
        (search.start, search.noise) =
            (first, (search.loss.rounding() * first.abs()).max((first - second).abs()));
        let all: Vec<Block> =
            (0..search.parameters.len()).filter_map(|place| search.block(place, |_| true)).collect();
        let jitter = search.ways(&all, TINY, u64::MAX)?;
        for way in jitter.0 {
            search.noise = search.noise.max((way - first).abs());
        }
        Ok(search)
    }

    pub(super) fn run(mut self) -> Result<GradientCheck, L::Error> {
        // Passes that find the place of what is lost do not count for the maximum.
        let mut locating = 0;
        let mut check = GradientCheck { parameters: self.parameters.len(), ..GradientCheck::default() };
        let mut is_known: Vec<bool> = self.parameters.iter().map(|parameter| !parameter.is_narrow).collect();
        if !self.start.is_finite() || !self.noise.is_finite() {
            is_known.fill(false);
        } else {
            let zero = self.blocks(|square| square == 0.0);
            let others = self.blocks(|square| square != 0.0);
            // What agrees takes up to 6 passes where there is no gradient, and 2 or 4 where there is one.
            let room = self.most_passes.saturating_sub(self.passes);
            for (blocks, groups) in [(zero, room / 3 / 6), (others, room * 2 / 3 / 4)] {
                let size = blocks.len().div_ceil(groups.max(1)).max(1);
                for group in blocks.chunks(size) {
                    let verdict = match self.passes + 2 <= self.most_passes {
                        true => self.probe(group)?,
                        false => Verdict::Unknown,
                    };
                    match verdict {
                        Verdict::Agrees => {}
                        Verdict::Unknown => group.iter().for_each(|block| is_known[block.parameter] = false),
                        Verdict::Lost if check.lost.len() < MOST_NAMED => {
                            let before = self.passes;
                            self.locate(group, 0, &mut check.lost)?;
                            locating += std::mem::replace(&mut self.passes, before) - before;
                        }
                        Verdict::Lost => check.has_more = true,
                    }
                }
            }
        }
        let lost = |name: &str| check.lost.iter().any(|lost| lost.name == name);
        let unknown = self
            .parameters
            .iter()
            .zip(&is_known)
            .filter(|(parameter, known)| !**known && !lost(&parameter.name));
        check.undecided = unknown.map(|(parameter, _)| parameter.name.clone()).collect();
        check.has_more |= check.lost.len() > MOST_NAMED;
        check.lost.truncate(MOST_NAMED);
        check.forward_passes = self.passes + locating;
        Ok(check)
    }

    /// The rows of a parameter of whose gradient `belongs` says so, by the sum of squares.
    fn block(&self, parameter: usize, belongs: impl Fn(f64) -> bool) -> Option<Block> {
        let Parameter { squares, is_narrow, .. } = &self.parameters[parameter];
        let mut rows: Vec<Range<usize>> = Vec::new();
        for row in (0..squares.len()).filter(|row| belongs(squares[*row])) {
            match rows.last_mut() {
                Some(last) if last.end == row => last.end += 1,
                _ => rows.push(row..row + 1),
            }
        }
        (!rows.is_empty() && !is_narrow).then_some(Block { parameter, rows })
    }

    fn blocks(&self, belongs: impl Fn(f64) -> bool) -> Vec<Block> {
        (0..self.parameters.len()).filter_map(|place| self.block(place, &belongs)).collect()
    }

    fn pass(&mut self) -> Result<f64, L::Error> {
        self.passes += 1;
        self.routes.pass(|| self.loss.loss())
    }

    /// The loss with the blocks moved forward, and back, along a direction; and the difference that the gradients predict.
    fn ways(&mut self, blocks: &[Block], distance: f64, number: u64) -> Result<([f64; 2], f64), L::Error> {
        let (mut changes, mut predicted) = (Vec::new(), 0.0);
        for block in blocks {
            let Parameter { hash, row_len, size, .. } = &self.parameters[block.parameter];
            let ranges: Vec<_> =
                block.rows.iter().map(|rows| rows.start * row_len..rows.end * row_len).collect();
            let (direction, distance) = (Direction { hash: *hash, number }, distance * size);
            for part in self.parts.iter().filter(|part| part.parameter == block.parameter) {
                let change = Change::new(part, &ranges, direction, distance).map_err(Error::from)?;
                if let Some(gradient) = part.gradient.as_ref().filter(|_| part.counts) {
                    predicted += change.predicted(gradient).map_err(Error::from)?;
                }
                changes.push(change);
            }
        }
        let mut sum = [predicted];
        self.loss.sum(&mut sum)?;
        let _kept = KeptVars::of(changes.iter().map(Change::var)).map_err(Error::from)?;
        let mut way = |way: f64| {
            changes.iter().try_for_each(|change| change.apply(way)).map_err(Error::from)?;
            self.pass()
        };
        Ok(([way(1.0)?, way(-1.0)?], sum[0]))
    }

    fn difference(&mut self, blocks: &[Block], distance: f64, number: u64) -> Result<Difference, L::Error> {
        let ([up, down], predicted) = self.ways(blocks, distance, number)?;
        let changed = up != self.start || down != self.start;
        Ok(Difference { measured: up - down, predicted, changed })
    }

    /// Compares the change of the loss with the gradients of some blocks, all together.
    fn probe(&mut self, blocks: &[Block]) -> Result<Verdict, L::Error> {
        let of = |block: &Block| {
            let Parameter { squares, size, .. } = &self.parameters[block.parameter];
            block.rows.iter().flat_map(Clone::clone).map(|row| squares[row] * size * size).sum::<f64>()
        };
        // What a gradient of this norm makes of a random direction, for a distance of 1.
        let usual = 2.0 * blocks.iter().map(of).sum::<f64>().sqrt();
        let distances: &[f64] = if usual == 0.0 { &LARGE_FIRST } else { &SMALL_FIRST };
        let (mut changed, mut bent) = (false, false);
        for (number, distance) in distances.iter().enumerate() {
            let number = number as u64;
            let far = self.difference(blocks, *distance, number)?;
            changed |= far.changed;
            if usual == 0.0 && !far.changed {
                return Ok(Verdict::Agrees);
            }
            let noise = CLEAR * self.noise;
            if !far.gap().is_finite() {
                bent = true;
                continue;
            }
            if far.gap().abs() <= noise + TOLERANCE * distance * usual {
                if bent || distance * usual > 2.0 * noise {
                    return Ok(Verdict::Agrees);
                }
                continue;
            }
            if far.gap().abs() < CLOSER * noise {
                // Closer, it would be too close to the noise to say whether it is proportional.
                continue;
            }
            let near = self.difference(blocks, distance / CLOSER, number)?.gap();
            if is_part_of(near, far.gap()) && self.is_confirmed(blocks, *distance, number, near)? {
                return Ok(Verdict::Lost);
            }
            let usual = distance / CLOSER * usual;
            if usual > 2.0 * noise && near.abs() <= noise + TOLERANCE * usual {
                return Ok(Verdict::Agrees);
            }
            bent = true;
        }
        Ok(if changed { Verdict::Unknown } else { Verdict::Agrees })
    }

    /// Confirms that a difference is proportional to the distance: closer still, or along another direction, if that would be too
    /// close to the noise. Many units that are switched on one after the other can look proportional over one step.
    fn is_confirmed(
        &mut self,
        blocks: &[Block],
        distance: f64,
        number: u64,
        near: f64,
    ) -> Result<bool, L::Error> {
        if near.abs() >= CLOSER * CLEAR * self.noise {
            let nearest = self.difference(blocks, distance / (CLOSER * CLOSER), number)?;
            return Ok(is_part_of(nearest.gap(), near));
        }
        let other = number + LARGE_FIRST.len() as u64;
        let far = self.difference(blocks, distance, other)?.gap();
        let near = self.difference(blocks, distance / CLOSER, other)?.gap();
        // A random direction may have next to no difference.
        Ok(far.abs() < CLOSER * CLEAR * self.noise || is_part_of(near, far))
    }

    /// Finds which of the blocks, and which of their rows, the difference comes from.
    fn locate(
        &mut self,
        blocks: &[Block],
        halvings: usize,
        lost: &mut Vec<LostGradient>,
    ) -> Result<(), L::Error> {
        if lost.len() > MOST_NAMED {
            return Ok(());
        }
        let halves = match blocks {
            [block] if halvings < HALVINGS => block.halves().map(|halves| halves.map(|half| vec![half])),
            [_] | [] => None,
            _ => {
                let (first, second) = blocks.split_at(blocks.len() / 2);
                Some([first.to_vec(), second.to_vec()])
            }
        };
        let Some(halves) = halves else {
            lost.extend(blocks.iter().map(|block| self.lost(block)));
            return Ok(());
        };
        let verdicts = [self.probe(&halves[0])?, self.probe(&halves[1])?];
        let is_one = blocks.len() == 1;
        match verdicts.map(|verdict| verdict == Verdict::Lost) {
            // All of it.
            [true, true] | [false, false] if is_one => lost.push(self.lost(&blocks[0])),
            // The difference is clear only where both are changed.
            [false, false] => lost.extend(blocks.iter().map(|block| self.lost(block))),
            found => {
                for (half, _) in halves.iter().zip(found).filter(|(_, found)| *found) {
                    self.locate(half, halvings + usize::from(is_one), lost)?;
                }
            }
        }
        Ok(())
    }

    fn lost(&self, block: &Block) -> LostGradient {
        let Parameter { name, rows, squares, .. } = &self.parameters[block.parameter];
        let is_zero = block.rows.iter().flat_map(Clone::clone).all(|row| squares[row] == 0.0);
        let is_whole = block.rows.len() == 1 && block.rows[0] == (0..*rows);
        LostGradient {
            name: name.clone(),
            rows: if is_whole { Vec::new() } else { block.rows.clone() },
            is_zero,
        }
    }
}

/// Whether a difference is that of a distance `CLOSER` times as large, divided by it.
fn is_part_of(near: f64, far: f64) -> bool {
    let expected = far / CLOSER;
    (near - expected).abs() <= 0.5 * expected.abs()
}

impl Block {
    /// Both halves of its rows, if it has several.
    fn halves(&self) -> Option<[Self; 2]> {
        let count: usize = self.rows.iter().map(Range::len).sum();
        let (mut left, mut halves) = (count / 2, [Vec::new(), Vec::new()]);
        for rows in &self.rows {
            let middle = rows.start + left.min(rows.len());
            left -= middle - rows.start;
            for (half, part) in halves.iter_mut().zip([rows.start..middle, middle..rows.end]) {
                half.extend((!part.is_empty()).then_some(part));
            }
        }
        let parameter = self.parameter;
        (count > 1).then(|| halves.map(|rows| Self { parameter, rows }))
    }
}

/// Sums up a parameter over all ranks.
fn describe<L: CheckedLoss>(
    loss: &mut L,
    index: usize,
    name: &str,
    dims: &[usize],
    parts: &[CheckedPart],
) -> Result<Parameter, L::Error> {
    let rows = dims.first().copied().unwrap_or(1);
    let row_len = dims.iter().skip(1).product::<usize>();
    // Sums of squares of the gradient of each row, and of the elements; whether they are narrow.
    let mut sums = vec![0.0; rows + 2];
    for part in parts.iter().filter(|part| part.parameter == index && part.counts) {
        if matches!(part.var.dtype(), DType::F16 | DType::BF16) {
            sums[rows + 1] = 1.0;
            continue;
        }
        let values = numbers(&part.var.as_detached_tensor()).map_err(Error::from)?;
        let gradient = part.gradient.as_ref().map(numbers).transpose().map_err(Error::from)?;
        for (own, element) in part.elements.iter().flat_map(Clone::clone).enumerate() {
            sums[rows] += values[own] * values[own];
            sums[element / row_len] +=
                gradient.as_ref().map_or(0.0, |gradient| gradient[own] * gradient[own]);
        }
    }
    loss.sum(&mut sums)?;
    let is_narrow = sums[rows + 1] > 0.0;
    let size = (sums[rows] / (rows * row_len).max(1) as f64).sqrt();
    sums.truncate(rows);
    let size = if size > 0.0 { size } else { OF_ZEROS };
    Ok(Parameter { name: name.into(), hash: hash(name), rows, row_len, squares: sums, size, is_narrow })
}
