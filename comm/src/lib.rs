//! Communication between ranks: the [`Communicator`] trait, its backends, and rendezvous. The crate `launch` starts the
//! ranks.
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
//!
//! Read it in this order: [`Communicator`]; [`Work`], a call in progress, and [`Operation`], what is called; [`Tcp`] with
//! [`TcpConfig`] and [`LaunchedRank`], which connect processes, and [`Local`], whose ranks are threads; [`Mesh`], groups of ranks
//! along axes; [`autograd`], collectives with gradients; [`Error`], which names the rank that failed.
//!
//! # Inside
//!
//! Folders are layers; each imports only those below it.
//!
//! ```text
//! launcher    what the crate `launch` needs to start ranks (`fuzz`: what strangers may send, for fuzzers)
//!   |
//! backend     Tcp, Local, Nccl, Mpi: each makes a group of ranks of the layers below
//!   |
//! api         what a program calls: the trait, meshes, objects, gradients
//!   |           comm.all_reduce(..) -> Work
//! engine      operations: checked, queued, fingerprinted, planned, executed
//!   |
//! rendezvous  ranks find each other and form a group, or form it again when it changes
//!   |
//! failure     timeouts; when a call fails or hangs, which rank caused it
//!   |
//! transport   streams to each peer (tcp, shm), or a library for whole operations
//!   |
//! connection  two processes prove to each other that they are of the job
//!   |
//! config      what a rank is told: its number, the meeting point, the job's secret
//!   |
//! base        operations, fingerprints, errors, members, the elements of tensors
//!   |
//! algorithm   schedules of collectives, as data: who sends what to whom in each step
//!   |
//! platform    what operating systems do differently
//! ```
//!
//! One `all_reduce` from the call to the socket:
//!
//! ```text
//! api/communicator/mod.rs    Communicator::all_reduce makes an Operation
//! backend/tcp/mod.rs         Tcp::submit queues it, and returns a Work
//! engine/queue/mod.rs        OperationQueue: checks arguments, runs in order
//! engine/runner/mod.rs       OperationRunner: sequence number and fingerprint
//! engine/plan/mod.rs         Planner: buffer, and schedule from `algorithm`
//! engine/executor/mod.rs     ScheduleExecutor: sends fingerprints, then the steps
//! transport/hybrid_links.rs  HybridLinks: a ring in shared memory on one host, or
//! transport/tcp/links.rs     TcpLinks: the socket (`connection/stream.rs`)
//! ```
// Unsafe code is allowed in single files only: bindings to system libraries (`platform`, `api/cuda_device.rs`,
// `backend/cuda_library.rs`, `backend/nccl`, `backend/mpi`), mapped memory (`transport/shm/region.rs`) and pinned memory
// (`base/buffer/staging/pinned.rs`).
#![deny(unsafe_code)]

pub mod internal;

// The layers, see above; `scripts/check-circles.py` checks that each uses only those after it.
#[doc(hidden)]
pub mod launcher;

#[cfg(any(test, fuzzing))]
pub mod fuzz;

mod backend;

mod api;

mod engine;

mod rendezvous;

mod failure;

mod transport;

mod connection;

mod config;

mod base;

pub mod algorithm;

mod platform;

pub use algorithm::topology::Topology;
pub use api::autograd;
pub use api::communicator::Communicator;
pub use api::communicator::elastic::ElasticGroup;
#[cfg(feature = "cuda")]
pub use api::cuda_device::open_cuda_device;
pub use api::mesh::Mesh;
pub use api::objects::{all_gather_object, broadcast_object, gather_object};
pub use api::tensors::broadcast_tensors;
pub use api::work::Work;
pub use backend::local::{Local, LocalConfig};
#[cfg(feature = "mpi")]
pub use backend::mpi::Mpi;
#[cfg(feature = "nccl")]
pub use backend::nccl::Nccl;
pub use backend::tcp::Tcp;
pub use base::error::{EXIT_PEER_FAILED, Error, Result, carried, carry};
pub use base::operation::{Message, Operation, ReduceOp};
pub use base::stats::Stats;
pub use config::elastic::Elastic;
pub use config::init_method::InitMethod;
pub use config::scheduler::LaunchedRank;
pub use config::secret::Secret;
pub use config::tcp_config::TcpConfig;
pub use config::tls::Tls;
pub use config::transport::Transport;
