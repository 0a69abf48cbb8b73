//! Fuzzes the four messages of a handshake.

#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| comm::fuzz::handshake(data));
