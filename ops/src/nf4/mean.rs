//! The mean of scales, to the bit that of PyTorch on one thread with vectors of 8 numbers: scales are rounded after it is
//! subtracted, so that another order of the sum is another quantization.

/// Numbers that a vector instruction adds.
const LANES: usize = 8;

/// Vectors that are summed independently.
const CHAINS: usize = 4;

/// Levels of the cascade: each sums some results of the level below.
const LEVELS: usize = 4;

pub(super) fn mean(numbers: &[f32]) -> f32 {
    let sum = if numbers.len() < LANES { sum::<1>(numbers) } else { sum::<LANES>(numbers) };
    sum / numbers.len() as f32
}

fn sum<const WIDTH: usize>(numbers: &[f32]) -> f32 {
    let (vectors, rest) = numbers.as_chunks::<WIDTH>();
    let (rows, single) = vectors.as_chunks::<CHAINS>();
    let mut chains = cascade(rows);
    for vector in single {
        add(&mut chains[0], vector);
    }
    let [mut total, others @ ..] = chains;
    others.iter().for_each(|chain| add(&mut total, chain));
    let rest: f32 = rest.iter().fold(0.0, |sum, x| sum + x);
    total.iter().fold(rest, |sum, x| sum + x)
}

/// Sums rows elementwise.
fn cascade<const WIDTH: usize>(rows: &[[[f32; WIDTH]; CHAINS]]) -> [[f32; WIDTH]; CHAINS] {
    let power = (rows.len().max(1).next_power_of_two().ilog2() as usize / LEVELS).max(4);
    let mut levels = [[[0.0; WIDTH]; CHAINS]; LEVELS];
    let whole = rows.len() >> power << power;
    for (at, row) in rows.iter().enumerate() {
        add_row(&mut levels[0], row);
        let mut done = at + 1;
        if done > whole {
            continue;
        }
        for level in 1..LEVELS {
            if done & ((1 << power) - 1) != 0 {
                break;
            }
            let below = std::mem::replace(&mut levels[level - 1], [[0.0; WIDTH]; CHAINS]);
            add_row(&mut levels[level], &below);
            done >>= power;
        }
    }
    let [mut total, others @ ..] = levels;
    others.iter().for_each(|level| add_row(&mut total, level));
    total
}

fn add_row<const WIDTH: usize>(to: &mut [[f32; WIDTH]; CHAINS], row: &[[f32; WIDTH]; CHAINS]) {
    to.iter_mut().zip(row).for_each(|(to, x)| add(to, x));
}

fn add<const WIDTH: usize>(to: &mut [f32; WIDTH], x: &[f32; WIDTH]) {
    to.iter_mut().zip(x).for_each(|(to, x)| *to += x);
}
