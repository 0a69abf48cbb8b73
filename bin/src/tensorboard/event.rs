//! The protocol buffers `Event`, `Summary` and `SessionLog`, of which these fields are used.

/// Fields of `Event`.
const WALL_TIME: u32 = 1;
const STEP: u32 = 2;
const FILE_VERSION: u32 = 3;
const SUMMARY: u32 = 5;
const SESSION_LOG: u32 = 7;
/// Of `Summary`.
const VALUE: u32 = 1;
/// Of `Summary.Value`.
const TAG: u32 = 1;
const SIMPLE_VALUE: u32 = 2;
/// Of `SessionLog`, and its value `START`.
const STATUS: u32 = 1;
const START: u64 = 1;

/// How a field's bytes are to be read.
#[derive(Debug, Clone, Copy)]
enum Wire {
    Varint = 0,
    Fixed64 = 1,
    Bytes = 2,
    Fixed32 = 5,
}

/// The first event of a file.
pub(super) fn version(time: f64) -> Vec<u8> {
    let mut event = at(time, 0);
    bytes(&mut event, FILE_VERSION, b"brain.Event:2");
    event
}

/// A run begins with this step: what earlier files have of it and of later ones is not shown.
pub(super) fn begin(time: f64, first_step: u64) -> Vec<u8> {
    let (mut event, mut log) = (at(time, first_step), Vec::new());
    key(&mut log, STATUS, Wire::Varint);
    varint(&mut log, START);
    bytes(&mut event, SESSION_LOG, &log);
    event
}

/// Values of a step.
pub(super) fn scalars(time: f64, step: u64, scalars: &[(&str, f64)]) -> Vec<u8> {
    let mut summary = Vec::new();
    for (tag, number) in scalars {
        let mut value = Vec::new();
        bytes(&mut value, TAG, tag.as_bytes());
        key(&mut value, SIMPLE_VALUE, Wire::Fixed32);
        value.extend((*number as f32).to_le_bytes());
        bytes(&mut summary, VALUE, &value);
    }
    let mut event = at(time, step);
    bytes(&mut event, SUMMARY, &summary);
    event
}

fn at(time: f64, step: u64) -> Vec<u8> {
    let mut event = Vec::new();
    key(&mut event, WALL_TIME, Wire::Fixed64);
    event.extend(time.to_le_bytes());
    key(&mut event, STEP, Wire::Varint);
    varint(&mut event, step);
    event
}

fn key(to: &mut Vec<u8>, field: u32, wire: Wire) {
    varint(to, u64::from(field << 3) | wire as u64);
}

fn bytes(to: &mut Vec<u8>, field: u32, bytes: &[u8]) {
    key(to, field, Wire::Bytes);
    varint(to, bytes.len() as u64);
    to.extend(bytes);
}

/// Seven bits a byte, the lowest first.
fn varint(to: &mut Vec<u8>, mut number: u64) {
    while number >= 0x80 {
        to.push(number as u8 | 0x80);
        number >>= 7;
    }
    to.push(number as u8);
}
