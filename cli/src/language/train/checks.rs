//! What is checked before ranks start.

use std::path::Path;

use crate::error::{Error, Result};
use crate::options::begin_note;
use girandole::Layout;
use models::ModelConfig;
use models::tokens::Rows;
use pipeline::ScheduleKind;

use crate::language::job::Subject;
use crate::language::options::TrainOptions;

/// Checks that a reference has positions for rows of this length.
pub(super) fn check_reference_len(reference: &Subject, len: usize) -> Result<()> {
    let longest = reference.weights.config().max_len;
    if longest >= len {
        return Ok(());
    }
    let help = format!("rows have {len} tokens: give a --length that it has positions for");
    Err(Error::Option { option: "--reference", got: format!("a model of {longest} positions"), help })
}

/// Checks that a reference can be divided as the model that is trained, whose layout and schedule it is computed in.
pub(super) fn check_reference_layout(
    reference: &ModelConfig,
    layout: &Layout,
    schedule: ScheduleKind,
) -> Result<()> {
    let checked = check_divisible(layout, reference).and_then(|()| check_stages(layout, schedule, reference));
    checked.map_err(|error| match error {
        Error::Option { help, .. } => {
            let got = format!("a {} of {} blocks", reference.family, reference.num_layers);
            let schedule = match layout.pp {
                1 => String::new(),
                _ => format!(" with --pipeline-schedule {schedule}"),
            };
            let help =
                format!("it is computed in --mesh {layout}{schedule}, as the model is trained: {help}");
            Error::Option { option: "--reference", got, help }
        }
        other => other,
    })
}

/// Refuses a file that would be among those of a model in a folder, which are replaced or read.
pub(super) fn refuse_in_folder(of: &str, out: &Path, option: &'static str, path: &Path) -> Result<()> {
    let out = out.canonicalize().ok();
    let name = |path: &Path| {
        let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
        let is_there = out.is_some() && folder.canonicalize().ok() == out;
        let name = path.file_name()?.to_str()?;
        (is_there && models::is_model_file(name)).then(|| name.to_string())
    };
    // By the name that is given, and by that of the file that it leads to.
    let Some(name) = name(path).or_else(|| name(&path.canonicalize().ok()?)) else { return Ok(()) };
    let help = format!("in {of}, {name} is a file of the model: give another name or folder");
    Err(Error::Option { option, got: path.display().to_string(), help })
}

/// Checks that the output folder holds no model, unless `--overwrite` is given or the run is resumed. Adapters never go
/// beside a whole model: who loads the folder would find two models in it.
pub(super) fn check_output_folder(options: &TrainOptions, saves_adapters: bool) -> Result<()> {
    let out = &options.out;
    let Some(file) = models::weights_in(out) else { return Ok(()) };
    let foreign = if saves_adapters || options.overwrite { None } else { models::foreign_adapters_in(out)? };
    let help = if let Some(adapters) = foreign {
        format!(
            "it holds adapters ({adapters}) of another run, which would be applied to the model: give another folder, or --overwrite"
        )
    } else if saves_adapters && !file.starts_with("adapter") {
        format!("it holds a whole model ({file}), and adapters alone are saved: give another folder")
    } else if options.overwrite
        || options.checkpoints.has_checkpoint_to_resume()?
        || begin_note::is_of_a_restarted_job(out, begin_note::MODEL)?
    {
        return Ok(());
    } else {
        begin_note::refuse(out, begin_note::MODEL)?;
        if options.checkpoints.keeps() {
            begin_note::refuse(options.checkpoints.dir(), begin_note::CHECKPOINTS)?;
        }
        format!("it holds a model already ({file}): give another folder, or --overwrite to replace the model")
    };
    Err(Error::Option { option: "--out", got: out.display().to_string(), help })
}

/// Checks that rows of so many tokens can be divided by the layout.
pub(super) fn check_division(layout: Option<Layout>, sequence_parallel: bool, len: usize) -> Result<()> {
    let layout = layout.unwrap_or_default();
    let refuse = |help: String| Err(Error::Option { option: "--length", got: len.to_string(), help });
    let multiple = if sequence_parallel { layout.tp } else { 1 };
    if !len.is_multiple_of(multiple) {
        return refuse(format!(
            "--sequence-parallel divides rows over the {multiple} ranks of tp: give a multiple of {multiple}"
        ));
    }
    let fewest = layout.cp * multiple;
    if len < fewest {
        return refuse(format!(
            "--mesh {layout} divides each row: give {fewest} or more, or a --mesh with a smaller cp"
        ));
    }
    Ok(())
}

/// Checks that the model's sizes can be divided by the layout.
pub(crate) fn check_divisible(layout: &Layout, model: &ModelConfig) -> Result<()> {
    let refuse = |help: String| Err(Error::Option { option: "--mesh", got: layout.to_string(), help });
    let sizes = [("heads", model.num_heads), ("heads of keys and values", model.num_kv_heads)];
    let has_dense = model.experts.as_ref().is_none_or(|experts| experts.layers.contains(&false));
    let dense = has_dense.then_some(("features of feed-forward layers", model.intermediate_size));
    let experts = model.experts.iter().flat_map(|experts| {
        let shared = experts.shared_width.map(|width| ("features of a shared expert", width));
        [Some(("features of experts", experts.width)), shared].into_iter().flatten()
    });
    let mut sizes = sizes.into_iter().chain(dense).chain(experts);
    if let Some((what, size)) = sizes.find(|(_, size)| !size.is_multiple_of(layout.tp)) {
        return refuse(format!("the model's {size} {what} cannot be divided over tp={} ranks", layout.tp));
    }
    check_experts(layout, model)?;
    let units = model.num_layers + 2;
    if layout.pp > units {
        return refuse(format!(
            "the model has {units} parts to cut between, {} blocks among them",
            model.num_layers
        ));
    }
    Ok(())
}

/// Checks that the model has experts for each rank that divides them.
fn check_experts(layout: &Layout, model: &ModelConfig) -> Result<()> {
    let help = match (layout.ep, &model.experts) {
        (1, _) => return Ok(()),
        (_, None) => "the model has no experts to divide: leave out ep".to_string(),
        (ep, Some(experts)) if ep > experts.count => {
            format!("the model has {} experts: give ep at most as many", experts.count)
        }
        _ => return Ok(()),
    };
    Err(Error::Option { option: "--mesh", got: layout.to_string(), help })
}

/// Checks that the model has a part for each stage of the pipeline schedule.
pub(super) fn check_stages(layout: &Layout, schedule: ScheduleKind, model: &ModelConfig) -> Result<()> {
    let (parts, each) = (model.num_layers + 2, schedule.stages_per_rank());
    if layout.pp == 1 || layout.pp.saturating_mul(each) <= parts {
        return Ok(());
    }
    let help = format!(
        "it has {each} stages on each of pp={} ranks, and the model has {parts} parts to cut between: give fewer ranks, or 1f1b",
        layout.pp
    );
    Err(Error::Option { option: "--pipeline-schedule", got: schedule.to_string(), help })
}

/// Checks that the targets of a batch of rows of this length can be counted in bytes.
pub(super) fn check_batch_size(batch_size: usize, length: usize) -> Result<()> {
    match batch_size.checked_mul(length).filter(|tokens| *tokens <= isize::MAX as usize / size_of::<i64>()) {
        Some(_) => Ok(()),
        None => {
            let help = format!("that many rows of {length} tokens fit in no memory: give fewer");
            Err(Error::Option { option: "--batch-size", got: batch_size.to_string(), help })
        }
    }
}

/// Checks that a target counts in the first `most` rows, those of an evaluation.
pub(super) fn check_evaluation(rows: &Rows, most: usize) -> Result<()> {
    let used = rows.len().min(most);
    for row in 0..used {
        if rows.get(row)?.counts() {
            return Ok(());
        }
    }
    let got = format!("{used} rows of {} tokens", rows.row_len());
    let help = "no target counts in those that are used, such as an answer of a conversation: give another text, a greater --length or more --evaluate-rows".into();
    Err(Error::Option { option: "--evaluate", got, help })
}

#[cfg(test)]
mod tests {
    use models::tokens::TokenWriter;

    use super::*;

    #[test]
    fn an_evaluation_needs_a_target_among_the_rows_that_it_uses() {
        let folder = tempfile::tempdir().unwrap();
        let mut writer = TokenWriter::create(&folder.path().join("t.tokens"), 9, None).unwrap();
        // Rows of 4 tokens: only those of the last one count.
        writer.push_counted(&[1; 41], |place| place > 36).unwrap();
        writer.end_document().unwrap();
        let rows = Rows::new(vec![(writer.finish().unwrap(), 1.0)], 4).unwrap();
        let check = |most| check_evaluation(&rows, most).map_err(|error| error.to_string());
        assert_eq!((rows.len(), check(64), check(10)), (10, Ok(()), Ok(())));
        for used in [1, 8, 9] {
            let said = check(used).unwrap_err();
            assert!(
                said.starts_with(&format!("--evaluate: got {used} rows of 4 tokens; no target")),
                "{said}"
            );
        }
    }

    /// The width of dense layers counts only where a block has one.
    #[test]
    fn a_width_that_no_block_has_is_not_divided() {
        let of = |dense: &str| {
            let json = format!(
                r#"{{"model_type": "qwen3_moe", "vocab_size": 32, "hidden_size": 16, "intermediate_size": 33, "num_hidden_layers": 2,
                "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8, "hidden_act": "silu", "max_position_embeddings": 8,
                "rms_norm_eps": 1e-5, "initializer_range": 0.02, "tie_word_embeddings": false, "rope_theta": 10000.0,
                "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12, "mlp_only_layers": [{dense}]}}"#
            );
            let model = ModelConfig::from_json(&json).unwrap();
            check_divisible(&"tp=2".parse().unwrap(), &model).map_err(|error| error.to_string())
        };
        assert_eq!(of(""), Ok(()));
        let said = of("1").unwrap_err();
        assert!(said.contains("33 features of feed-forward layers cannot be divided over tp=2"), "{said}");
    }

    /// Before ranks start, by the option that it comes from, whatever the model that is trained has.
    #[test]
    fn a_reference_that_the_layout_cannot_divide_is_refused() {
        let json = r#"{"model_type": "llama", "vocab_size": 32, "hidden_size": 12, "intermediate_size": 32, "num_hidden_layers": 2,
            "num_attention_heads": 3, "num_key_value_heads": 3, "hidden_act": "silu", "max_position_embeddings": 8,
            "rms_norm_eps": 1e-5, "initializer_range": 0.02, "tie_word_embeddings": false, "rope_theta": 10000.0}"#;
        let model = ModelConfig::from_json(json).unwrap();
        let check = |layout: &str, schedule| {
            let checked = check_reference_layout(&model, &layout.parse().unwrap(), schedule);
            checked.map_err(|error| error.to_string())
        };
        assert_eq!(check("pp=2,dp=2", ScheduleKind::OneFOneB), Ok(()));
        for (layout, schedule, why) in [
            ("tp=2", ScheduleKind::OneFOneB, "3 heads cannot be divided over tp=2"),
            ("pp=3", ScheduleKind::ZbV, "2 stages on each of pp=3 ranks"),
            ("ep=2", ScheduleKind::OneFOneB, "no experts to divide"),
        ] {
            let said = check(layout, schedule).unwrap_err();
            assert!(said.starts_with("--reference: got a llama of 2 blocks; it is computed in "), "{said}");
            assert!(said.contains(&format!("--mesh {layout}")) && said.contains(why), "{said}");
        }
    }

    #[test]
    fn stages_and_rows_that_cannot_be_are_refused() {
        let json = r#"{"model_type": "llama", "vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 6,
            "num_attention_heads": 2, "num_key_value_heads": 2, "hidden_act": "silu", "max_position_embeddings": 8,
            "rms_norm_eps": 1e-5, "initializer_range": 0.02, "tie_word_embeddings": false, "rope_theta": 10000.0}"#;
        let model = ModelConfig::from_json(json).unwrap();
        let check = |layout: &str, schedule| {
            check_stages(&layout.parse().unwrap(), schedule, &model).map_err(|error| error.to_string())
        };
        assert_eq!(check("pp=4", ScheduleKind::ZbV), Ok(()));
        assert_eq!(check("pp=5", ScheduleKind::OneFOneB), Ok(()));
        let said = check("pp=5", ScheduleKind::ZbV).unwrap_err();
        assert!(said.starts_with("--pipeline-schedule: got zb-v; it has 2 stages on each of pp=5"), "{said}");
        assert!(check_batch_size(1 << 39, 1 << 20).is_ok());
        for size in [usize::MAX, 1 << 41] {
            let said = check_batch_size(size, 1 << 20).unwrap_err().to_string();
            assert!(said.starts_with("--batch-size: got "), "{said}");
        }
    }
}
