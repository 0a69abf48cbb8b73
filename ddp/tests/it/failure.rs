//! Every failure is an error on every rank it concerns, and all later calls return it.

use crate::common::{INPUTS, Mlp, builder, on_ranks, values};
use candle_core::{CpuStorage, CustomOp1, DType, Device, Layout, Shape, Tensor};
use candle_nn::{Module, VarBuilder, VarMap};
use ddp::{Ddp, DdpConfig, Error, Result};

/// Builds these parameters on rank 1 (of three), and `a` and `b` of two elements on the others; returns each rank's error.
fn mismatch(odd: &[(&'static str, &'static [usize])], dtype: DType, config: &DdpConfig) -> Vec<Error> {
    let results = on_ranks(3, |comm| {
        let (parameters, dtype, config) = match comm.rank() {
            1 => (odd, dtype, config.clone()),
            _ => (&[("a", &[2usize] as &[usize]), ("b", &[2])] as &[_], DType::F32, DdpConfig::default()),
        };
        let build = |vb: VarBuilder<'static>| {
            let get = |(name, shape): &(&str, &[usize])| vb.get(*shape, name);
            parameters.iter().map(get).collect::<candle_core::Result<Vec<_>>>()
        };
        Ddp::new(comm, builder(1, parameters, dtype), &config, build).map(drop)
    });
    results.into_iter().map(|result| result.expect("no panic").expect_err("the models differ")).collect()
}

#[track_caller]
fn assert_mismatch(errors: &[Error], expected_place: usize, words: &[&str]) {
    for error in errors {
        let text = error.to_string();
        assert!(
            matches!(error, Error::ModelMismatch(found) if (found.odd_rank, found.rank, found.place) == (1, 0, expected_place)),
            "{text}"
        );
        assert!(words.iter().all(|word| text.contains(word)), "{text}");
    }
}

#[test]
fn different_models_are_an_error_on_all_ranks_that_names_the_first_difference() {
    let default = DdpConfig::default();
    let (f32, f64) = (DType::F32, DType::F64);
    assert_mismatch(&mismatch(&[("a", &[2]), ("b", &[3])], f32, &default), 2, &["b [3] F32", "b [2] F32"]);
    assert_mismatch(&mismatch(&[("a", &[1, 2]), ("b", &[2])], f32, &default), 1, &["a [1, 2]", "a [2]"]);
    assert_mismatch(
        &mismatch(&[("a", &[2]), ("c", &[2])], f32, &default),
        2,
        &["parameter c", "parameter b"],
    );
    assert_mismatch(
        &mismatch(&[("b", &[2]), ("a", &[2])], f32, &default),
        1,
        &["parameter b", "parameter a"],
    );
    assert_mismatch(&mismatch(&[("a", &[2])], f32, &default), 2, &["rank 1 has nothing", "parameter b"]);
    assert_mismatch(&mismatch(&[("a", &[2]), ("b", &[2])], f64, &default), 1, &["F64", "F32"]);
    let config = DdpConfig { bucket_bytes: 7, ..Default::default() };
    assert_mismatch(&mismatch(&[("a", &[2]), ("b", &[2])], f32, &config), 0, &["buckets of 7 bytes"]);
    let config = DdpConfig { buffers: vec!["b".into()], ..Default::default() };
    assert_mismatch(&mismatch(&[("a", &[2]), ("b", &[2])], f32, &config), 2, &["buffer b", "parameter b"]);
}

#[test]
fn a_rank_that_cannot_build_its_model_ends_the_others() {
    let results = on_ranks(2, |comm| {
        let parameters: &[(&str, &[usize])] = if comm.rank() == 0 { &[("a", &[2])] } else { &[] };
        Ddp::new(comm, builder(1, parameters, DType::F32), &DdpConfig::default(), |vb| vb.get(2, "a"))
            .map(drop)
    });
    let errors: Vec<Error> =
        results.into_iter().map(|result| result.expect("no panic").expect_err("not built")).collect();
    assert!(matches!(&errors[0], Error::Comm(comm::Error::PeerLeft { rank: 1, .. })), "{}", errors[0]);
    assert!(errors[0].is_peer_failure() && !errors[1].is_peer_failure());
    assert!(errors[1].to_string().contains("building the model: "), "{}", errors[1]);
}

/// The identity operation, which panics or fails in backward.
struct Faulty {
    panics: bool,
}

impl CustomOp1 for Faulty {
    fn name(&self) -> &'static str {
        "faulty"
    }

    fn cpu_fwd(&self, storage: &CpuStorage, layout: &Layout) -> candle_core::Result<(CpuStorage, Shape)> {
        Ok((storage.clone(), layout.shape().clone()))
    }

    fn bwd(&self, _: &Tensor, _: &Tensor, _: &Tensor) -> candle_core::Result<Option<Tensor>> {
        assert!(!self.panics, "as it should");
        candle_core::bail!("this rank fails")
    }
}

/// Trains until, at the third step, one rank fails in the middle of backward. Returns each rank's error and that of its next
/// call; `None` for a rank that panicked.
fn one_fails(world_size: usize, panics: bool, config: &DdpConfig) -> Vec<Option<Result<[Error; 2]>>> {
    on_ranks(world_size, |comm| {
        let rank = comm.rank();
        let ddp = Mlp::ddp(comm, DType::F32, config)?;
        let mut step = 0;
        let error = loop {
            let mut x = values(step, &[4, INPUTS], DType::F32);
            if step == 2 && rank == 1 {
                // Depends on a parameter of the first layer, so backward reaches it after the buckets of the last layers.
                let first = ddp.parameters()[0].tensor();
                x = (x
                    + (first.apply_op1(Faulty { panics })?.sum_all()? * 0.5)?.broadcast_as((4, INPUTS))?)?;
            }
            match ddp.backward(&ddp.forward(&x)?.sqr()?.mean_all()?) {
                Ok(_) => step += 1,
                Err(error) => break error,
            }
        };
        let again = ddp.model().err().expect("it has failed before");
        let and_again = ddp.backward_no_sync(&Tensor::new(1f32, &Device::Cpu)?).expect_err("it has failed");
        assert_eq!(and_again.to_string(), again.to_string());
        // The other ranks may still be at the end of the previous step, in which they need nothing more from the failed rank.
        assert!(step == 1 || step == 2, "{step}");
        Ok([error, again])
    })
}

#[test]
fn a_rank_that_dies_in_the_middle_of_a_step_is_an_error_on_all_others() {
    let apart = DdpConfig { bucket_bytes: 0, first_bucket_bytes: 0, ..Default::default() };
    for (world_size, config) in [(2, DdpConfig::default()), (3, apart.clone()), (4, apart)] {
        let mut results = one_fails(world_size, true, &config);
        assert!(results.remove(1).is_none(), "it panicked");
        for result in results {
            let [error, again] = result.expect("no other panic").expect("an error to look at");
            assert!(matches!(&error, Error::Comm(comm::Error::PeerDied { rank: 1, .. })), "{error}");
            assert!(error.is_peer_failure());
            assert_eq!(error.to_string(), again.to_string());
        }
    }
}

#[test]
fn a_rank_whose_backward_fails_is_of_no_use_any_more() {
    let mut results = one_fails(2, false, &DdpConfig::default());
    let [error, again] = results.remove(1).expect("no panic").expect("an error to look at");
    assert!(error.to_string().contains("this rank fails") && !error.is_peer_failure(), "{error}");
    assert_eq!(error.to_string(), again.to_string());
    let [error, _] = results.remove(0).expect("no panic").expect("an error to look at");
    assert!(matches!(&error, Error::Comm(comm::Error::PeerLeft { rank: 1, .. })), "{error}");
}

/// Returns the error of building this model on a single rank.
fn refused<M>(build: impl FnOnce(VarBuilder<'static>) -> candle_core::Result<M>) -> Error {
    let comm = comm::Local::group(1, &comm::LocalConfig::default()).expect("one rank").remove(0);
    let vb = builder(1, &[("a", &[2]), ("running_mean", &[3])], DType::F32);
    Ddp::new(std::sync::Arc::new(comm), vb, &DdpConfig::default(), build).expect_err("refused")
}

#[test]
fn one_name_is_one_parameter() {
    let shapes = refused(|vb| Ok((vb.get(2, "a")?, vb.get((2, 1), "a")?)));
    assert!(matches!(shapes, Error::Ambiguous { parameter, .. } if parameter == "a"));
    let name = "running_mean";
    let buffers = refused(|vb| Ok((vb.get(3, name)?, vb.get(3, name)?, vb.get(4, name)?)));
    assert!(matches!(buffers, Error::Ambiguous { parameter, .. } if parameter == name));
    let dtypes = refused(|vb| Ok((vb.get(2, "a")?, vb.to_dtype(DType::F16).get(2, "a")?)));
    assert!(matches!(dtypes, Error::Ambiguous { first, then, .. } if (&*first, &*then) == ("F32", "F16")));
    let dtype = refused(|vb| vb.to_dtype(DType::F8E4M3).get(2, "a"));
    assert!(matches!(dtype, Error::UnsupportedDtype { dtype: DType::F8E4M3, .. }));
}

#[test]
fn parameters_are_asked_for_while_the_model_is_built() {
    let comm = comm::Local::group(1, &comm::LocalConfig::default()).expect("one rank").remove(0);
    let variables = VarMap::new();
    let vb = VarBuilder::from_varmap(&variables, DType::F32, &Device::Cpu);
    let ddp = Ddp::new(std::sync::Arc::new(comm), vb, &DdpConfig::default(), Ok).expect("nothing to build");
    let late = ddp.model().expect("no failure").get(2, "a").expect_err("too late");
    assert!(matches!(Error::from(late), Error::RequestedAfterBuild { parameter } if parameter == "a"));
}
