//! Properties of all commands: errors are reported in one line, whatever the arguments.

#[cfg(unix)]
mod full_disk;
mod help;
mod huge;
#[cfg(unix)]
mod inputs;
mod kept;
#[cfg(target_os = "linux")]
mod paths;
#[cfg(target_os = "linux")]
mod signals;
#[cfg(target_os = "linux")]
mod stopped;
mod words;
mod workers;
