//! What the strategies and commands of these crates share, and a training program does not need: files that appear complete or not at
//! all ([`AtomicFile`], [`TensorWriter`]) and are checked before they are used ([`open_input`], [`tensor_header`]), whose backward
//! pass runs ([`backward_of`]), sums of gradients ([`GradSums`]), variables that get their values back ([`KeptVars`]), the steps of clipping, positions of a shard's elements ([`Runs`]),
//! functions of the matrices in a tensor ([`map_matrices`]).

pub use crate::backward_owner::{BackwardOwner, backward_of, backward_owner};
pub use crate::clip::{clip_by_norm, clip_factor, first_not_finite};
pub use crate::file::{
    AtomicFile, TensorHeader, TensorWriter, open_input, open_output, read_input, remove_drafts,
    tensor_header, write_output, write_tensors,
};
pub use crate::file_error::first_line;
pub use crate::grad_sums::GradSums;
pub use crate::gradient_check::{CheckedLoss, CheckedPart, KeptVars, check_gradient_of};
pub use crate::optimizer::map_matrices;
pub use crate::runs::Runs;
pub use crate::state::{is_buffer, known_buffers};
pub use crate::tensor_file::check_writable;
pub use ops::kernels::lock;
