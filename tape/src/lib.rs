//! Backward through candle's graph without its sums onto zeros.
//!
//! candle's `loss.backward()` makes a tensor of zeros for each gradient of each operation and adds the gradient to that. For large
//! activations that is four times the memory traffic of the gradient itself, and a tenth of a training step. An operation that
//! was applied by [`apply_op1`], [`apply_op2`] or [`apply_op3`] is known to [`backward`] here, which hands its gradients on as
//! they are, and adds only where a tensor was used several times; views such as `reshape` are known as well. Through other operations,
//! and what they depend on, candle goes. The gradients are the same, but for the sign of a zero.
//!
//! The order to read in: [`apply_op2`] (`apply.rs`), the table of what was applied (`table.rs`), [`backward`] (`backward.rs`).
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
//! let y = tape::apply_op1(&x, Doubled)?;
//! let loss = tape::seeded(&y, Tensor::new(&[10f32, 100.0], &Device::Cpu)?)?;
//! assert_eq!(tape::backward(&loss)?.get(&x).unwrap().to_vec1::<f32>()?, [20.0, 200.0]);
//! # Ok::<(), candle_core::Error>(())
//! ```

mod add;
mod apply;
mod backward;
mod guard;
mod seed;
mod table;

pub use add::{add, scale};
pub use apply::{apply_op1, apply_op2, apply_op3};
pub use backward::{backward, empty};
pub use guard::{Guard, guard};
pub use seed::seeded;
