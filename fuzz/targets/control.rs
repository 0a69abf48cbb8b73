//! Fuzzes the messages on control connections.

#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| comm::fuzz::control(data));
