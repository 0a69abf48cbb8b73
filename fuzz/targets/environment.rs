//! Fuzzes the environment variables that give a rank and its meeting point.

#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| comm::fuzz::environment(data));
