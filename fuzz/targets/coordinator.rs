//! Fuzzes the messages that the nodes of a job send to the coordinator.

#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| launch::fuzz::coordinator(data));
