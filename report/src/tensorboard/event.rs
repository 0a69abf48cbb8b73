//! Encoding of the protocol buffers `Event`, `Summary` and `SessionLog`, with only the fields used here.

/// Field numbers of `Event`.
const WALL_TIME: u32 = 1;
const STEP: u32 = 2;
const FILE_VERSION: u32 = 3;
const SUMMARY: u32 = 5;
const SESSION_LOG: u32 = 7;
/// Field number of `Summary`.
const VALUE: u32 = 1;
/// Field numbers of `Summary.Value`.
const TAG: u32 = 1;
const SIMPLE_VALUE: u32 = 2;
/// Field number of `SessionLog`, and its value `START`.
const STATUS: u32 = 1;
const START: u64 = 1;

/// Wire type of a field.
#[derive(Debug, Clone, Copy)]
enum Wire {
    Varint = 0,
    Fixed64 = 1,
    Bytes = 2,
    Fixed32 = 5,
}

/// Encodes the first event of a file: the format version.
pub(super) fn version(time: f64) -> Vec<u8> {
    let mut event = at(time, 0);
    bytes(&mut event, FILE_VERSION, b"brain.Event:2");
    event
}

/// Encodes the start of a run at this step: TensorBoard discards values of earlier files from this step on.
pub(super) fn begin(time: f64, first_step: u64) -> Vec<u8> {
    let (mut event, mut log) = (at(time, first_step), Vec::new());
    key(&mut log, STATUS, Wire::Varint);
    varint(&mut log, START);
    bytes(&mut event, SESSION_LOG, &log);
    event
}

/// Encodes the scalar values of a step.
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

/// Appends a varint: seven bits per byte, lowest first.
fn varint(to: &mut Vec<u8>, mut number: u64) {
    while number >= 0x80 {
        to.push(number as u8 | 0x80);
        number >>= 7;
    }
    to.push(number as u8);
}
