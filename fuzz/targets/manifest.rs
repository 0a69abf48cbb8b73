//! Fuzzes the manifest of a checkpoint.

#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| training::fuzz_manifest(data));
