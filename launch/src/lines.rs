//! Splits the bytes read from a pipe into lines and messages to the launcher.

use comm::launcher::MET_PREFIX;

/// Marks a line of a worker's standard output that is a report to the launcher.
pub(super) const RESULT_PREFIX: &str = "\u{1}girandole-result:";
/// Marks a line that is a note to the launcher.
pub(super) const NOTE_PREFIX: &str = "\u{1}girandole-note:";
/// Longest report, in bytes.
pub(super) const MAX_RESULT: usize = 64 << 20;
/// A line longer than this many bytes is passed on in pieces; lines of other ranks may come between these.
const MAX_LINE: usize = 64 << 20;
/// Buffer capacity that is kept for the next line.
const KEPT: usize = 1 << 20;

/// Output of a [`LineBuffer`].
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Item<'a> {
    /// A line with its newline, or a piece of an over-long line. Only the last piece of the stream may end without a
    /// newline.
    Text(&'a [u8]),
    /// The report: what follows its prefix, without the newline.
    Report(&'a [u8]),
    /// The note: what follows its prefix, without the newline.
    Note(&'a [u8]),
    /// This rank has joined the group; the text after the prefix lists the excluded ranks.
    Met(&'a [u8]),
}

/// Collects an unfinished line in a bounded buffer.
#[derive(Debug)]
pub(super) struct LineBuffer {
    line: Vec<u8>,
    reports: bool,
    max_line: usize,
}

impl LineBuffer {
    /// With `reports`, messages to the launcher are recognized; without, every line is text.
    pub(super) fn new(reports: bool) -> Self {
        Self { line: Vec::new(), reports, max_line: MAX_LINE }
    }

    /// Appends `chunk`, and passes each line that it completes to `each`.
    pub(super) fn push(&mut self, chunk: &[u8], mut each: impl FnMut(Item<'_>)) {
        for part in chunk.split_inclusive(|&byte| byte == b'\n') {
            self.line.extend_from_slice(part);
            if part.ends_with(b"\n") {
                self.end_of_line(&mut each);
            } else if self.line.len() > self.limit() {
                each(Item::Text(&self.line));
                self.clear();
            }
        }
    }

    /// Passes on what is left when the stream ends.
    pub(super) fn finish(&mut self, mut each: impl FnMut(Item<'_>)) {
        if !self.line.is_empty() {
            each(Item::Text(&self.line));
            self.line.clear();
        }
    }

    fn end_of_line(&mut self, each: &mut impl FnMut(Item<'_>)) {
        match self.message_at() {
            Some((at, prefix)) => {
                let message = &self.line[at + prefix.len()..self.line.len() - 1];
                each(match prefix {
                    RESULT_PREFIX => Item::Report(message),
                    NOTE_PREFIX => Item::Note(message),
                    _ => Item::Met(message),
                });
                // Text that was printed before the message without a newline is the start of an unfinished line.
                self.line.truncate(at);
            }
            None => {
                each(Item::Text(&self.line));
                self.clear();
            }
        }
    }

    fn clear(&mut self) {
        self.line.clear();
        self.line.shrink_to(KEPT);
    }

    /// Returns the offset and the prefix of a message to the launcher, if the line has one.
    fn message_at(&self) -> Option<(usize, &'static str)> {
        let first = self.line.iter().position(|&byte| self.reports && byte == RESULT_PREFIX.as_bytes()[0])?;
        let begins = |at: usize| {
            let prefixes = [RESULT_PREFIX, NOTE_PREFIX, MET_PREFIX];
            prefixes.into_iter().find(|prefix| self.line[at..].starts_with(prefix.as_bytes()))
        };
        (first..self.line.len()).find_map(|at| begins(at).map(|prefix| (at, prefix)))
    }

    fn limit(&self) -> usize {
        let longer = self.line.len() > self.max_line && self.message_at().is_some();
        if longer { MAX_RESULT + self.max_line } else { self.max_line }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn text(items: &mut Vec<Vec<u8>>) -> impl FnMut(Item<'_>) {
        |item| match item {
            Item::Text(bytes) => items.push(bytes.to_vec()),
            Item::Report(bytes) => items.push([b"report ", bytes].concat()),
            Item::Note(bytes) => items.push([b"note ", bytes].concat()),
            Item::Met(bytes) => items.push([b"met ", bytes].concat()),
        }
    }

    fn cut(chunks: &[&[u8]], max_line: usize) -> Vec<String> {
        let mut items = Vec::new();
        let mut buffer = LineBuffer { max_line, ..LineBuffer::new(true) };
        for chunk in chunks {
            buffer.push(chunk, text(&mut items));
        }
        buffer.finish(text(&mut items));
        items.into_iter().map(|item| String::from_utf8(item).unwrap()).collect()
    }

    #[test]
    fn lines_are_put_together_and_the_last_one_may_lack_its_newline() {
        assert_eq!(cut(&[b"on", b"e\ntwo\nth", b"ree"], 100), ["one\n", "two\n", "three"]);
        assert_eq!(cut(&[b"\n\n"], 100), ["\n", "\n"]);
        assert!(cut(&[b""], 100).is_empty());
    }

    #[test]
    fn an_over_long_line_comes_in_pieces() {
        assert_eq!(cut(&[b"abcd", b"efgh", b"ij\nk\n"], 5), ["abcdefgh", "ij\n", "k\n"]);
    }

    #[test]
    fn a_report_is_taken_out_even_from_the_middle_of_a_line_and_may_be_long() {
        let report = format!("{RESULT_PREFIX}{{\"loss\":1}}\n");
        assert_eq!(cut(&[b"a\n", report.as_bytes(), b"b\n"], 5), ["a\n", "report {\"loss\":1}", "b\n"]);
        let (start, end) = report.as_bytes().split_at(9);
        assert_eq!(cut(&[b"start ", start, end, b"end\n"], 100), ["report {\"loss\":1}", "start end\n"]);
    }

    #[test]
    fn notes_are_told_from_reports() {
        let line = format!("{NOTE_PREFIX}7 of 9\n{MET_PREFIX}\n{MET_PREFIX}3 4\n{RESULT_PREFIX}done\n");
        let items = cut(&[b"a", line.as_bytes(), b"b\n"], 100);
        assert_eq!(items, ["note 7 of 9", "met ", "met 3 4", "report done", "ab\n"]);
    }

    #[test]
    fn where_no_report_is_expected_its_prefix_is_text() {
        let mut items = Vec::new();
        let line = format!("{RESULT_PREFIX}x\n");
        LineBuffer::new(false).push(line.as_bytes(), text(&mut items));
        assert_eq!(items, [line.into_bytes()]);
    }

    proptest! {
        #[test]
        fn nothing_is_lost_or_added(chunks in prop::collection::vec("[a\n\u{1}]{0,20}", 0..10), max_line in 1..30_usize) {
            let bytes: Vec<&[u8]> = chunks.iter().map(String::as_bytes).collect();
            let items = cut(&bytes, max_line);
            prop_assert_eq!(items.concat(), chunks.concat());
            for item in items {
                prop_assert!(!item.is_empty() && !item[..item.len() - 1].contains('\n'));
                prop_assert!(item.len() <= max_line + 20);
            }
        }
    }
}
