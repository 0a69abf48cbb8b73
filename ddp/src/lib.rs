//! Data-parallel training: every rank has a copy of the model and a part of the batch, and gradients are averaged
//! while backward computes them.
//!
//! Any model that is built with a `VarBuilder` and any `candle_nn::Optimizer` will do. The lines that differ from a
//! program for one process are those with `Ddp` or `ddp`:
//!
//! ```
//! # use std::sync::Arc;
//! use candle_core::{DType, Device, Result, Tensor};
//! use candle_nn::{Module, Optimizer, SGD, VarBuilder, VarMap, linear, loss};
//! use comm::{Communicator, Local, LocalConfig};
//! use ddp::{Ddp, DdpConfig};
//!
//! fn train(comm: Arc<dyn Communicator>) -> Result<Vec<f32>> {
//!     let rank = comm.rank() as f32;
//!     let variables = VarMap::new();
//!     let vb = VarBuilder::from_varmap(&variables, DType::F32, &Device::Cpu);
//!     let ddp = Ddp::new(comm, vb, &DdpConfig::default(), |vb| linear(1, 1, vb))?;
//!     let mut optimizer = SGD::new(ddp.vars(), 0.05)?;
//!     let x = Tensor::new(&[[rank], [rank + 2.0]], &Device::Cpu)?;
//!     let y = ((&x * 2.0)? + 3.0)?;
//!     for _ in 0..200 {
//!         let loss = loss::mse(&ddp.forward(&x)?, &y)?;
//!         let grads = ddp.backward(&loss)?;
//!         optimizer.step(&grads)?;
//!     }
//!     ddp.forward(&Tensor::new(&[[10f32]], &Device::Cpu)?)?.flatten_all()?.to_vec1()
//! }
//!
//! // Two ranks as threads; in earnest they are processes.
//! let ranks = Local::group(2, &LocalConfig::default())?;
//! let threads: Vec<_> =
//!     ranks.into_iter().map(|comm| std::thread::spawn(|| train(Arc::new(comm)))).collect();
//! for thread in threads {
//!     let predicted = thread.join().expect("no panic")?;
//!     assert!((predicted[0] - 23.0).abs() < 0.5);
//! }
//! # Ok::<(), ddp::Error>(())
//! ```
//!
//! # How it works
//!
//! [`Ddp::new`] builds the model with a `VarBuilder` that wraps the given one. Of each parameter the model gets a
//! copy, made by an operation that is the identity forward. During backward candle calls that operation as soon as the
//! gradient of its output is complete, last layer first; it puts the gradient into a *bucket*, a flat tensor for
//! several parameters. When a bucket is full and those before it have gone out, its all-reduce begins on the
//! communicator's thread, while backward goes on with earlier layers. Buckets are first filled in reverse order of
//! construction, and after the first step in the order in which gradients came on rank 0.
//!
//! A trace shows the spans `backward`, in it `bucket` for each bucket that goes out, and `wait` for what was not hidden
//! behind backward; the communicator's own are called `collective`.
//!
//! A layer that computes `weight.matmul(input)`, weight first, gets its gradient after those of the layers before it:
//! candle goes backward through the last argument first. Write `input.matmul(weight)`, as `candle_nn` does.
#![forbid(unsafe_code)]

mod agreement;
mod buckets;
mod builder;
mod comm_hook;
mod config;
mod error;
mod hook;
mod initial;
mod model;
mod parameter;
mod plan;
mod reducer;
mod weights;

use std::sync::{Mutex, MutexGuard, PoisonError};

pub use comm_hook::{BucketHook, CommHook, GradBucket, GradSlot, PowerSgdConfig, Reduction};
pub use config::DdpConfig;
pub use error::{Error, Result};
pub use model::Ddp;
pub use parameter::Parameter;

/// Locks; a panic elsewhere while it was locked makes the Ddp fail by other means.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
