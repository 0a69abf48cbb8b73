//! The order of a billion rows, without a permutation of them in memory, beside what PyTorch gives. It draws four billion random numbers:
//!
//!     cargo run --release -p girandole-sampler --example billion_rows

use sampler::{LazyPermutation, SamplerError};

/// Of `torch.randperm(10**9, generator=torch.Generator().manual_seed(7))`, the first rows and those from the middle on.
const FIRST: [usize; 6] = [93268064, 421403967, 806271965, 468455432, 354108767, 588514494];
const MIDDLE: [usize; 4] = [272916529, 780165226, 420995645, 419794161];

fn main() -> Result<(), SamplerError> {
    let mut order = LazyPermutation::new(7, 1_000_000_000);
    let first: Vec<usize> = order.by_ref().take(FIRST.len()).collect::<Result<_, _>>()?;
    order.advance(500_000_000 - order.position())?;
    let middle: Vec<usize> = order.take(MIDDLE.len()).collect::<Result<_, _>>()?;
    assert_eq!((first, middle), (FIRST.to_vec(), MIDDLE.to_vec()));
    eprintln!("as PyTorch");
    Ok(())
}
