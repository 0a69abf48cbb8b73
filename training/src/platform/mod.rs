//! Platform layer: functions with the same contract on all operating systems. `--cfg portable` makes a Linux build
//! use the code for other systems, so that it is tested.

#[cfg_attr(all(target_os = "linux", not(portable)), path = "linux.rs")]
#[cfg_attr(not(all(target_os = "linux", not(portable))), path = "portable.rs")]
mod system;

pub(crate) use system::{link, nameless};
