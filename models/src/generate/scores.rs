//! Scores of the next token: what the configuration changes before one is chosen, as `transformers` does.

use std::collections::BTreeSet;

use super::GenerateConfig;

impl GenerateConfig {
    /// Changes the logits of the token after `row`, of which the last `new` tokens were generated. A token that must not
    /// come gets minus infinity.
    pub(super) fn change(&self, scores: &mut [f32], row: &[u32], new: usize) {
        if self.repetition_penalty != 1.0 {
            let penalty = self.repetition_penalty as f32;
            for token in row.iter().collect::<BTreeSet<_>>() {
                if let Some(score) = scores.get_mut(*token as usize) {
                    *score = if *score < 0.0 { *score * penalty } else { *score / penalty };
                }
            }
        }
        for token in self.excluded(row, new) {
            if let Some(score) = scores.get_mut(token as usize) {
                *score = f32::NEG_INFINITY;
            }
        }
    }

    /// Returns the tokens that must not come.
    fn excluded(&self, row: &[u32], new: usize) -> Vec<u32> {
        let mut tokens = self.suppress_tokens.clone();
        if new == 0 {
            tokens.extend(&self.begin_suppress_tokens);
        }
        if new < self.min_new_tokens {
            tokens.extend(&self.stop);
        }
        let size = self.no_repeat_ngram_size;
        if size > 0 && row.len() >= size {
            let last = &row[row.len() + 1 - size..];
            let again = row.windows(size).filter(|window| window[..size - 1] == *last);
            tokens.extend(again.map(|window| window[size - 1]));
        }
        // A token that ends the text may always come.
        let is_end = |word: &&Vec<u32>| matches!(&word[..], [token] if self.stop.contains(token));
        for word in self.bad_words.iter().filter(|word| !is_end(word)) {
            tokens
                .extend(word.split_last().filter(|(_, before)| row.ends_with(before)).map(|(last, _)| last));
        }
        tokens
    }

    /// Returns the tokens to sample from, the likeliest first, with weights proportional to their probabilities.
    pub(super) fn candidates(&self, scores: &[f32]) -> Vec<(u32, f64)> {
        let mut all: Vec<(u32, f32)> = (0..).zip(scores.iter().copied()).collect();
        // Ties are in order of the token ids.
        all.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
        if let Some((_, lowest)) = self.top_k.and_then(|k| all.get(k.max(1) - 1)).copied() {
            // Those that are as likely as the last one stay as well.
            all.truncate(all.partition_point(|(_, score)| *score >= lowest));
        }
        let top = all.first().map_or(0.0, |(_, score)| f64::from(*score));
        let weight = |score: f32| match f64::from(score) - top {
            // One or more infinite logits: infinity minus infinity.
            difference if difference.is_nan() => 1.0,
            difference => (difference / self.temperature).exp(),
        };
        let mut all: Vec<(u32, f64)> = all.into_iter().map(|(token, score)| (token, weight(score))).collect();
        if let Some(top_p) = self.top_p.filter(|top_p| *top_p < 1.0) {
            let total: f64 = all.iter().map(|(_, weight)| weight).sum();
            let mut before = 0.0;
            let kept = all.iter().take_while(|(_, weight)| {
                let is_kept = before < top_p * total;
                before += weight;
                is_kept
            });
            let kept = kept.count().max(1);
            all.truncate(kept);
        }
        if let Some(min_p) = self.min_p {
            // The likeliest has a weight of 1.
            let kept = all.partition_point(|(_, weight)| *weight >= min_p).max(1);
            all.truncate(kept);
        }
        all
    }
}

/// Returns the first token with the largest score.
pub(super) fn argmax(scores: &[f32]) -> u32 {
    let best =
        (0u32..).zip(scores).fold(
            (0, f32::NEG_INFINITY),
            |best, (token, &score)| {
                if score > best.1 { (token, score) } else { best }
            },
        );
    best.0
}

#[cfg(test)]
mod tests {
    use serde::Deserialize;
    use serde_json::{Map, Value, json};

    use super::*;

    fn tokens(config: GenerateConfig, logits: &[f32]) -> Vec<u32> {
        config.candidates(logits).into_iter().map(|(token, _)| token).collect()
    }

    #[test]
    fn likely_tokens_are_kept() {
        let logits = [0.1f32.ln(), 0.4f32.ln(), 0.2f32.ln(), 0.3f32.ln()];
        let with = |top_k, top_p| GenerateConfig { temperature: 1.0, top_k, top_p, ..Default::default() };
        assert_eq!(tokens(with(None, None), &logits), [1, 3, 2, 0]);
        assert_eq!(tokens(with(Some(2), None), &logits), [1, 3]);
        assert_eq!(tokens(with(Some(9), None), &logits), [1, 3, 2, 0]);
        assert_eq!(tokens(with(None, Some(0.5)), &logits), [1, 3]);
        assert_eq!(tokens(with(None, Some(0.01)), &logits), [1]);
        assert_eq!(tokens(with(None, Some(1.0)), &logits), [1, 3, 2, 0]);
        // `top_p` applies to the tokens that `top_k` leaves, as in transformers.
        assert_eq!(tokens(with(Some(2), Some(0.5)), &logits), [1]);
        assert_eq!(tokens(with(Some(1), None), &[1.0, 3.0, 3.0]), [1, 2]);
        assert_eq!(argmax(&[1.0, 3.0, 3.0]), 1);
    }

    #[derive(Deserialize)]
    struct Case {
        settings: Map<String, Value>,
        prompt: Vec<u32>,
        new: Vec<u32>,
        logits: Vec<f32>,
        scores: Vec<Option<f32>>,
    }

    /// Random logits, with settings of `generation_config.json`: see `make_generation.py` beside the file.
    #[test]
    fn scores_are_those_of_transformers() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/generation.json");
        let cases: Vec<Case> = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
        assert_eq!(cases.len(), 44);
        let dir = tempfile::tempdir().unwrap();
        for Case { mut settings, prompt, new, logits, scores } in cases {
            let what = format!("{settings:?} after {} tokens", new.len());
            settings.insert("eos_token_id".into(), json!([3, 7]));
            std::fs::write(dir.path().join("generation_config.json"), json!(settings).to_string()).unwrap();
            let (config, note) = GenerateConfig::from_folder(dir.path(), prompt.len()).unwrap();
            assert_eq!(note, None, "{what}");
            let mut found = logits.clone();
            config.change(&mut found, &[&prompt[..], &new].concat(), new.len());
            let kept = scores.iter().filter(|score| score.is_some()).count();
            if config.temperature == 0.0 {
                for (found, expected) in found.iter().zip(&scores) {
                    let expected = expected.unwrap_or(f32::NEG_INFINITY);
                    assert!(
                        *found == expected || (found - expected).abs() < 1e-6,
                        "{what}: {found}, {expected}"
                    );
                }
                assert!(kept > 40, "{what}");
                continue;
            }
            let candidates: Vec<_> =
                config.candidates(&found).into_iter().filter(|(_, weight)| *weight > 0.0).collect();
            assert_eq!(candidates.len(), kept, "{what}");
            let weight = |score: &Option<f32>| score.map_or(0.0, |score| f64::from(score).exp());
            let total: f64 = scores.iter().map(weight).sum();
            let own: f64 = candidates.iter().map(|(_, weight)| weight).sum();
            for (token, found) in candidates {
                let expected = weight(&scores[token as usize]) / total;
                assert!((found / own - expected).abs() < 1e-6, "{what}: token {token}, {expected}");
            }
        }
    }
}
