//! Merges the traces of many ranks into one file.

use std::fmt;

use serde::de::{Deserializer, Error as _, SeqAccess, Visitor};
use serde_json::{Map, Value, json};

use super::RankTrace;
use crate::Error;

type Event = Map<String, Value>;

/// Merges traces into one Chrome trace of all ranks. Each rank is a process (`rank 0 (host)`) with its threads, and all
/// have one time axis, which begins when the first of them started to record.
///
/// # Cost
/// Events are processed one at a time; the memory is that of the text.
///
/// # Errors
/// [`Error::Malformed`] names the rank whose part is not a JSON array of events.
pub fn merge(parts: &[RankTrace]) -> crate::Result<String> {
    let origin = parts.iter().map(|part| part.started_unix_us).min().unwrap_or_default();
    let mut out =
        Merged { text: String::with_capacity(parts.iter().map(|part| part.json.len() + 256).sum()) };
    out.text.push_str("{\"displayTimeUnit\":\"ms\",\"traceEvents\":[");
    for part in parts {
        out.name(part);
        let shift = (part.started_unix_us - origin) as f64;
        let events = Events { out: &mut out, rank: part.rank, shift };
        let mut input = serde_json::Deserializer::from_str(&part.json);
        input.deserialize_seq(events).and_then(|()| input.end()).map_err(|error| Error::Malformed {
            rank: part.rank,
            host: part.host.clone(),
            reason: error.to_string(),
        })?;
    }
    out.text.push_str("\n]}\n");
    Ok(out.text)
}

struct Merged {
    text: String,
}

impl Merged {
    fn push(&mut self, event: &Value) {
        let first = self.text.ends_with('[');
        self.text.push_str(if first { "\n" } else { ",\n" });
        self.text.push_str(&event.to_string());
    }

    /// Writes the events that set a rank's name and its position in the list.
    fn name(&mut self, part: &RankTrace) {
        let name = format!("rank {} ({})", part.rank, part.host);
        self.push(&json!({ "ph": "M", "pid": part.rank, "name": "process_name", "args": { "name": name } }));
        self.push(
            &json!({ "ph": "M", "pid": part.rank, "name": "process_sort_index", "args": { "sort_index": part.rank } }),
        );
    }
}

/// Copies a rank's events to the output, one by one.
struct Events<'a> {
    out: &'a mut Merged,
    rank: usize,
    shift: f64,
}

impl<'de> Visitor<'de> for Events<'_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an array of trace events")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut events: A) -> Result<(), A::Error> {
        while let Some(mut event) = events.next_element::<Event>()? {
            event.insert("pid".into(), self.rank.into());
            if let Some(time) = event.get_mut("ts") {
                let shifted =
                    time.as_f64().ok_or_else(|| A::Error::custom("an event's time is no number"))?
                        + self.shift;
                *time = shifted.into();
            }
            // A name in a metadata event stays text, even if it consists of digits.
            let metadata = event.get("ph").is_some_and(|kind| kind == "M");
            if let Some(Value::Object(args)) = event.get_mut("args").filter(|_| !metadata) {
                args.values_mut().for_each(tidy);
            }
            self.out.push(&Value::Object(event));
        }
        Ok(())
    }
}

/// Converts a field back to a number or text: the recorder writes its debug form, such as `"4"` or `"\"ring\""`.
fn tidy(value: &mut Value) {
    let Value::String(text) = value else { return };
    if let Ok(plain @ (Value::Number(_) | Value::String(_) | Value::Bool(_))) = serde_json::from_str(text) {
        *value = plain;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn part(rank: usize, started_unix_us: u64, json: &str) -> RankTrace {
        RankTrace { rank, host: format!("h\"{rank}"), started_unix_us, json: json.to_string() }
    }

    fn events(text: &str) -> Vec<Value> {
        let parsed: Value = serde_json::from_str(text).unwrap();
        parsed["traceEvents"].as_array().unwrap().clone()
    }

    #[test]
    fn ranks_are_processes_on_one_time_axis() {
        let spans = r#"[
            {"ph":"M","pid":1,"tid":0,"name":"thread_name","args":{"name":"7"}},
            {"ph":"B","pid":1,"tid":0,"ts":1.5,"name":"step","args":{"batch":"4","kind":"\"ring\"","op":"Sum"}},
            {"ph":"E","pid":1,"tid":0,"ts":2.5,"name":"step"}
        ]"#;
        let text = merge(&[part(0, 1_000_000, spans), part(1, 999_990, spans)]).unwrap();
        let events = events(&text);
        assert_eq!(events.len(), 10);
        assert_eq!(events[0]["args"]["name"], "rank 0 (h\"0)");
        assert_eq!(events[6]["args"]["sort_index"], 1);
        let starts: Vec<_> = events.iter().filter(|e| e["ph"] == "B").collect();
        assert_eq!((&starts[0]["pid"], starts[0]["ts"].as_f64()), (&json!(0), Some(11.5)));
        assert_eq!((&starts[1]["pid"], starts[1]["ts"].as_f64()), (&json!(1), Some(1.5)));
        assert_eq!(starts[0]["args"], json!({ "batch": 4, "kind": "ring", "op": "Sum" }));
        assert_eq!(events[2]["args"]["name"], "7");
    }

    #[test]
    fn nothing_is_a_trace_too() {
        assert!(events(&merge(&[]).unwrap()).is_empty());
        assert_eq!(events(&merge(&[part(0, 0, "[\n\n]")]).unwrap()).len(), 2);
    }

    #[test]
    fn a_broken_part_is_named() {
        for json in ["", "[", "{}", "[1]", "[{}] x", r#"[{"ts":"soon"}]"#] {
            let line = merge(&[part(0, 0, "[]"), part(3, 0, json)]).unwrap_err().to_string();
            assert!(line.contains("rank 3"), "{json}: {line}");
        }
    }
}
