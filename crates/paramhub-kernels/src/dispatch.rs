use std::fmt;
use std::sync::OnceLock;

use thiserror::Error;

/// The environment variable that names the widest instruction set kernels may use: `baseline`, `avx2` or `avx512`.
///
/// For tests and comparisons: it makes this processor compute with the kernels of a lesser one.
pub const ISA_VARIABLE: &str = "PARAMHUB_ISA";

/// [`ISA_VARIABLE`] names no instruction set.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error(
    "PARAMHUB_ISA is `{0}`: set it to baseline, avx2 or avx512, or leave it out to use the widest set of this processor"
)]
pub struct UnknownIsa(String);

/// An instruction set that this CPU has. A value of this type proves that a kernel body compiled for the set
/// may run.
///
/// Every kernel picks [`Isa::best`] by itself. The explicit form (`add_with(isa, ..)`,
/// [`Sgd::with_isa`](crate::Sgd::with_isa)) lets tests and benchmarks run each body.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Isa(Body);

/// The bodies each kernel is compiled to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Body {
    /// Only what the compilation target guarantees: SSE2 on x86-64, NEON on AArch64.
    Baseline,
    /// AVX2 and F16C.
    #[cfg(target_arch = "x86_64")]
    Avx2,
    /// AVX-512 F, BW, DQ and VL.
    #[cfg(target_arch = "x86_64")]
    Avx512,
}

impl Isa {
    /// The widest set of this CPU that [`ISA_VARIABLE`] permits, looked up once per process.
    ///
    /// A value of the variable that names no set has no effect here; programs check it with
    /// [`check_environment`](Self::check_environment).
    pub fn best() -> Self {
        static BEST: OnceLock<Isa> = OnceLock::new();
        *BEST.get_or_init(|| {
            let value = std::env::var(ISA_VARIABLE).unwrap_or_default();
            Self::widest(Self::limit(&value).unwrap_or_default())
        })
    }

    /// Returns whether [`ISA_VARIABLE`], if it is set, names an instruction set.
    pub fn check_environment() -> Result<(), UnknownIsa> {
        let value = std::env::var_os(ISA_VARIABLE).unwrap_or_default();
        Self::limit(&value.to_string_lossy()).map(drop)
    }

    /// The widest set that is not wider than `limit`.
    fn widest(limit: Option<Body>) -> Self {
        let permitted = |isa: &Self| limit.is_none_or(|limit| isa.0 <= limit);
        Self::available().filter(permitted).last().unwrap_or(Self::baseline())
    }

    /// The limit that a value of [`ISA_VARIABLE`] sets; an empty one sets none. Every name is valid on every
    /// processor.
    fn limit(value: &str) -> Result<Option<Body>, UnknownIsa> {
        Ok(Some(match value {
            "" => return Ok(None),
            "baseline" => Body::Baseline,
            #[cfg(target_arch = "x86_64")]
            "avx2" => Body::Avx2,
            #[cfg(target_arch = "x86_64")]
            "avx512" => Body::Avx512,
            #[cfg(not(target_arch = "x86_64"))]
            "avx2" | "avx512" => Body::Baseline,
            other => return Err(UnknownIsa(other.to_owned())),
        }))
    }

    /// The set that the compilation target guarantees; every CPU has it.
    pub const fn baseline() -> Self {
        Self(Body::Baseline)
    }

    /// Every set this CPU has, narrowest first.
    pub fn available() -> impl Iterator<Item = Self> {
        let candidates = [
            (true, Body::Baseline),
            #[cfg(target_arch = "x86_64")]
            (is_x86_feature_detected!("avx2") && is_x86_feature_detected!("f16c"), Body::Avx2),
            #[cfg(target_arch = "x86_64")]
            (
                is_x86_feature_detected!("avx512f")
                    && is_x86_feature_detected!("avx512bw")
                    && is_x86_feature_detected!("avx512dq")
                    && is_x86_feature_detected!("avx512vl"),
                Body::Avx512,
            ),
        ];
        candidates.into_iter().filter(|(present, _)| *present).map(|(_, body)| Self(body))
    }

    /// `baseline`, `avx2` or `avx512`.
    pub fn name(self) -> &'static str {
        match self.0 {
            Body::Baseline => "baseline",
            #[cfg(target_arch = "x86_64")]
            Body::Avx2 => "avx2",
            #[cfg(target_arch = "x86_64")]
            Body::Avx512 => "avx512",
        }
    }

    pub(crate) fn body(self) -> Body {
        self.0
    }
}

impl fmt::Debug for Isa {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl fmt::Display for Isa {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Compiles one scalar loop once per instruction set, and adds a first argument `isa: Isa` that selects the
/// copy.
///
/// The compiler vectorises each copy for its set. It never contracts a multiplication and an addition into a
/// fused one by itself, even if the set has it, so the copies agree to the bit.
macro_rules! kernel {
    ($(#[$attribute:meta])* $visibility:vis fn $name:ident($($argument:ident: $type:ty),* $(,)?)
        $(-> $answer:ty)? $code:block) => {
        $(#[$attribute])*
        $visibility fn $name(isa: $crate::dispatch::Isa, $($argument: $type),*) $(-> $answer)? {
            #[inline(always)]
            fn body($($argument: $type),*) $(-> $answer)? $code

            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,f16c")]
            fn avx2($($argument: $type),*) $(-> $answer)? {
                body($($argument),*)
            }

            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
            fn avx512($($argument: $type),*) $(-> $answer)? {
                body($($argument),*)
            }

            match isa.body() {
                $crate::dispatch::Body::Baseline => body($($argument),*),
                #[cfg(target_arch = "x86_64")]
                // SAFETY: an `Isa` of this kind exists only where its features were detected.
                $crate::dispatch::Body::Avx2 => unsafe { avx2($($argument),*) },
                #[cfg(target_arch = "x86_64")]
                // SAFETY: an `Isa` of this kind exists only where its features were detected.
                $crate::dispatch::Body::Avx512 => unsafe { avx512($($argument),*) },
            }
        }
    };
}
pub(crate) use kernel;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn baseline_comes_first_and_the_widest_last() {
        let all: Vec<Isa> = Isa::available().collect();
        assert_eq!(all.first(), Some(&Isa::baseline()));
        assert_eq!(all.last(), Some(&Isa::widest(None)));
    }

    #[test]
    fn the_environment_limits_the_set_and_wrong_names_are_refused() {
        assert_eq!(Isa::limit("").unwrap(), None);
        for (name, most) in [("baseline", 1), ("avx2", 2), ("avx512", 3)] {
            let limit = Isa::limit(name).unwrap();
            let available = Isa::available().take(most).last();
            assert_eq!(Some(Isa::widest(limit)), available, "{name}");
        }
        let refused = Isa::limit("avx1024").unwrap_err().to_string();
        assert!(refused.contains("`avx1024`") && refused.contains("baseline, avx2 or avx512"), "{refused}");
    }
}
