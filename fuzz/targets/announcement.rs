//! Fuzzes the announcement that precedes data on a connection.

#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| comm::fuzz::announcement(data));
