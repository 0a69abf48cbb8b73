//! What operating systems do differently, behind functions that mean the same on all of them. `--cfg portable` makes a build for
//! Linux take the way of the others, so that it is tested.

#[cfg_attr(all(target_os = "linux", not(portable)), path = "linux.rs")]
#[cfg_attr(not(all(target_os = "linux", not(portable))), path = "portable.rs")]
mod system;

pub(crate) use system::{link, nameless};
