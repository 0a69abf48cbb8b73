//! Ranks that talk: the [`Communicator`] trait, its backends, how ranks find each other and how they are started.
//!
//! ```
//! use candle_core::{DType, Device, Tensor};
//! use comm::{Communicator, Local, ReduceOp};
//!
//! let means = Local::run(4, |comm| {
//!     let tensor = (Tensor::ones(8, DType::F32, &Device::Cpu)? * comm.rank() as f64)?;
//!     comm.all_reduce(&tensor, ReduceOp::Avg)?.wait()?;
//!     Ok(tensor.to_vec1::<f32>()?[0])
//! })?;
//! assert_eq!(means, [1.5; 4]);
//! # Ok::<(), comm::Error>(())
//! ```
// `cuda_library.rs` opens libraries, `platform` asks the system what the standard library does not tell, `shm/region.rs` maps
// memory, and `shm/user.rs` asks who is at the other end of a socket.
#![deny(unsafe_code)]

mod agree;
pub mod algorithm;
pub mod autograd;
mod blame;
mod carrier;
mod communicator;
#[cfg(feature = "cuda")]
mod cuda_library;
mod element;
mod ending;
mod engine;
mod error;
mod executor;
mod fingerprint;
#[cfg(any(test, fuzzing))]
pub mod fuzz;
mod group;
mod last_words;
pub mod launch;
mod links;
mod local;
mod members;
mod memory;
mod mesh;
mod mistakes;
#[cfg(feature = "mpi")]
mod mpi;
#[cfg(feature = "nccl")]
mod nccl;
mod norm;
mod objects;
mod operation;
mod overlap;
mod patience;
mod plan;
mod platform;
mod replicas;
mod runner;
pub mod schedule;
mod scheduler;
mod shm;
#[cfg_attr(not(feature = "cuda"), path = "staging/nothing.rs")]
mod staging;
mod stats;
mod storage;
mod supervisor;
mod tcp;
mod tensors;
mod topology;
#[cfg(any(feature = "mpi", feature = "nccl"))]
mod traffic;
mod upload;
mod variables;
mod verdict;
mod work;

pub use agree::{all_agree, first_of};
pub use communicator::Communicator;
#[cfg(feature = "cuda")]
pub use cuda_library::CudaLibrary;
pub use error::{Error, Result, carried, carry};
pub use local::{Local, LocalConfig};
pub use mesh::Mesh;
#[cfg(feature = "mpi")]
pub use mpi::Mpi;
#[cfg(feature = "nccl")]
pub use nccl::Nccl;
pub use norm::global_norm;
pub use objects::{all_gather_object, broadcast_object, gather_object};
pub use operation::{Message, Operation, ReduceOp};
pub use platform::{peak_rss_bytes, reset_peak_rss, total_memory_bytes};
pub use replicas::{ParameterDifference, parameter_difference};
pub use scheduler::Place;
pub use stats::Stats;
pub use tcp::{Elastic, InitMethod, Secret, Tcp, TcpConfig, Tls, Transport};
pub use tensors::broadcast_tensors;
pub use topology::Topology;
pub use upload::upload_pinned;
pub use work::Work;
