//! Fuzzes the messages of the rendezvous.

#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| comm::fuzz::meeting(data));
