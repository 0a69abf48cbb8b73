//! What kernels outside of this crate are written with, such as the steps of optimizers: loops over blocks of slices for the widest
//! vectors of the processor, and those kernels for CUDA devices that are no operations.

pub use crate::blocks::{BLOCK, blocks, blocks_of_work, has_one_thread};
pub use crate::cuda::{adam, knows, squares};
pub use crate::dense::dense;
pub use crate::lock::lock;
pub use crate::product::Narrow;
pub use crate::real::{Real, sum};
pub use crate::scoped::scoped;
pub use crate::simd::run;
pub use crate::vectorized;
pub use crate::warning::warn;
