//! Says that a system is not supported, in the place of an error for each thing that it does not have.
#![allow(clippy::print_stdout, reason = "that is how Cargo is told")]

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    if std::env::var_os("CARGO_CFG_UNIX").is_none() {
        println!("cargo::error=Girandole runs on Linux and macOS; on Windows, use it in WSL 2");
    }
}
