//! Backward through candle's graph without zero tensors and sums onto them.
//!
//! candle's `loss.backward()` allocates a tensor of zeros for each gradient of each operation and adds the gradient
//! to it. For large activations that is four times the memory traffic of the gradient itself, and a tenth of a
//! training step. The [`backward`] of this crate knows the operations that were applied by [`apply_op1`],
//! [`apply_op2`] or [`apply_op3`]: it passes their gradients on without a copy, and adds only where a tensor was used
//! several times. It knows views such as `reshape` as well. For other operations, and everything they depend on, it
//! calls candle's backward. The gradients are the same, except for the sign of a zero.
//!
//! Suggested reading order: [`apply_op2`] (`apply.rs`), the table of applied operations (`table.rs`), [`backward`]
//! (`backward.rs`).
//!
//! ```
//! use candle_core::{CpuStorage, CustomOp1, Device, Layout, Result, Shape, Tensor, Var};
//!
//! struct Doubled;
//!
//! impl CustomOp1 for Doubled {
//!     fn name(&self) -> &'static str {
//!         "doubled"
//!     }
//!
//!     fn cpu_fwd(&self, x: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
//!         let numbers = x.as_slice::<f32>()?[layout.start_offset()..].iter().take(layout.shape().elem_count());
//!         Ok((CpuStorage::F32(numbers.map(|x| 2.0 * x).collect()), layout.shape().clone()))
//!     }
//!
//!     fn bwd(&self, _: &Tensor, _: &Tensor, gradient: &Tensor) -> Result<Option<Tensor>> {
//!         Ok(Some((gradient * 2.0)?))
//!     }
//! }
//!
//! let x = Var::new(&[1f32, 3.0], &Device::Cpu)?;
//! let y = ops::tape::apply_op1(&x, Doubled)?;
//! let loss = ops::tape::scalar_with_gradient(&y, Tensor::new(&[10f32, 100.0], &Device::Cpu)?)?;
//! assert_eq!(ops::tape::backward(&loss)?.get(&x).unwrap().to_vec1::<f32>()?, [20.0, 200.0]);
//! # Ok::<(), candle_core::Error>(())
//! ```

mod add;
mod apply;
mod backward;
mod explicit;
mod guard;
mod seed;
mod table;

pub use add::{add, scale};
pub use apply::{apply_op1, apply_op2, apply_op3};
pub use backward::{backward, empty, knows, storage_address};
pub use explicit::{explicit_op1, explicit_op2, explicit_op3};
pub use guard::{Guard, guard};
pub use seed::scalar_with_gradient;
