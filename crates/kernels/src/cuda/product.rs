//! Matrix products by cuBLASLt, with fused epilogues and a timed choice of algorithm per shape.
//!
//! cuBLASLt counts columns first, the plan rows first: a row-major matrix [r, c] is a column-major
//! one of c rows and r columns. A linear layer `y[rows, outputs] = x[rows, inputs] · wᵀ` with
//! `w[outputs, inputs]` is therefore the column-major product `y = wᵀ · x`.

use super::device::{CudaError, failed};
use super::element_type::ElementType;
use cudarc::cublaslt::{result, sys};
use cudarc::driver::CudaStream;
use cudarc::driver::sys::{CUdeviceptr, CUevent_flags};
use std::collections::BTreeMap;
use std::ffi::c_void;
use std::sync::Arc;

/// Pass of a linear layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Pass {
    /// `y = x · wᵀ`
    Forward,
    /// `dx = dy · w`
    InputGradient,
    /// `dw = dyᵀ · x`
    WeightGradient,
}

/// Computation fused behind a product.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Epilogue {
    /// Nothing.
    None,
    /// Adds a bias to the columns of a forward pass.
    Bias,
    /// Adds a bias, keeps the sum and applies GELU (tanh form).
    BiasGelu,
    /// Multiplies an input gradient by GELU's slope at the kept sum.
    GeluGradient,
    /// The same, and sums its columns into the bias gradient of the layer before.
    GeluGradientBias,
    /// Bias gradient beside a weight gradient: the column sums of `dy`.
    BiasGradient,
}

/// Shape of a product of a linear layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Product {
    /// Pass of the layer.
    pub pass: Pass,
    /// Rows of `x` and `y`.
    pub rows: u64,
    /// Columns of `x`.
    pub inputs: u64,
    /// Columns of `y`.
    pub outputs: u64,
    /// Element type of the operands.
    pub operand: ElementType,
    /// Element type of the result.
    pub result: ElementType,
    /// True to add to the result's former value, or to `addend`.
    pub accumulate: bool,
    /// Fused computation.
    pub epilogue: Epilogue,
}

/// Addresses of a product's tensors; 0 where the epilogue has none.
#[derive(Clone, Copy, Debug, Default)]
pub struct Operands {
    /// `x`, or `dy` for the input gradient.
    pub left: CUdeviceptr,
    /// `w`, or `dy` for the weight gradient.
    pub right: CUdeviceptr,
    /// Matrix that is added if the product accumulates.
    pub addend: CUdeviceptr,
    /// Result.
    pub result: CUdeviceptr,
    /// Bias, or its gradient.
    pub bias: CUdeviceptr,
    /// Sum before GELU.
    pub kept: CUdeviceptr,
}

/// Algorithm of a product, as cuBLASLt describes it.
#[derive(Clone, Copy, Debug)]
struct Choice {
    algorithm: sys::cublasLtMatmulAlgo_t,
    workspace: usize,
}

/// cuBLASLt on one stream, with a workspace of its own: equal inputs give equal bits.
pub struct Products {
    handle: sys::cublasLtHandle_t,
    stream: Arc<CudaStream>,
    workspace: CUdeviceptr,
    workspace_bytes: usize,
    chosen: BTreeMap<Product, Choice>,
}

// SAFETY: a cuBLASLt handle may be used from any thread; it is used from one at a time.
unsafe impl Send for Products {}

/// Algorithms that are timed for a shape.
const CANDIDATES: usize = 16;
/// Timed runs of an algorithm; the fastest counts.
const RUNS: usize = 5;

/// Descriptors of a call, destroyed with it.
struct Descriptors {
    matmul: sys::cublasLtMatmulDesc_t,
    layouts: [sys::cublasLtMatrixLayout_t; 3],
}

impl Drop for Descriptors {
    fn drop(&mut self) {
        // SAFETY: created in `Products::describe`, destroyed once.
        unsafe {
            let _ = result::destroy_matmul_desc(self.matmul);
            for layout in self.layouts {
                let _ = result::destroy_matrix_layout(layout);
            }
        }
    }
}

impl Products {
    /// Opens cuBLASLt for a stream.
    ///
    /// # Safety
    ///
    /// `workspace` is the address of `bytes` bytes, aligned to 256, which only this object uses as
    /// long as it lives.
    pub unsafe fn new(
        stream: &Arc<CudaStream>,
        workspace: CUdeviceptr,
        bytes: usize,
    ) -> Result<Self, CudaError> {
        let handle = result::create_handle().map_err(failed("starting cuBLASLt"))?;
        Ok(Self {
            handle,
            stream: Arc::clone(stream),
            workspace,
            workspace_bytes: bytes,
            chosen: BTreeMap::new(),
        })
    }

    /// Queues a product. Without an earlier [`Self::tune`] it uses the library's first choice.
    ///
    /// # Safety
    ///
    /// The addresses are valid for the shape's tensors until the stream has passed the product.
    pub unsafe fn run(&mut self, product: Product, at: &Operands) -> Result<(), CudaError> {
        let described = self.describe(&product, at)?;
        let choice = match self.chosen.get(&product) {
            Some(choice) => *choice,
            None => {
                let found = self.candidates(&product, &described, 1)?;
                *self.chosen.entry(product).or_insert(found[0])
            }
        };
        // SAFETY: the caller's promise.
        unsafe { self.launch(&product, &described, at, &choice) }
            .map_err(failed(&format!("{product:?}")))
    }

    /// Times the library's candidates for a shape and keeps the fastest. Overwrites the result.
    ///
    /// # Safety
    ///
    /// As for [`Self::run`].
    pub unsafe fn tune(&mut self, product: Product, at: &Operands) -> Result<f64, CudaError> {
        let described = self.describe(&product, at)?;
        let mut best: Option<(f32, Choice)> = None;
        for choice in self.candidates(&product, &described, CANDIDATES)? {
            // SAFETY: the caller's promise.
            if unsafe { self.launch(&product, &described, at, &choice) }.is_err() {
                continue;
            }
            let mut fastest = f32::INFINITY;
            for _ in 0..RUNS {
                let flags = Some(CUevent_flags::CU_EVENT_DEFAULT);
                let start = self.stream.record_event(flags).map_err(failed("timing a product"))?;
                // SAFETY: the caller's promise.
                let _ = unsafe { self.launch(&product, &described, at, &choice) };
                let end = self.stream.record_event(flags).map_err(failed("timing a product"))?;
                fastest = fastest.min(start.elapsed_ms(&end).map_err(failed("timing a product"))?);
            }
            if best.as_ref().is_none_or(|(time, _)| fastest < *time) {
                best = Some((fastest, choice));
            }
        }
        let (time, choice) = best.ok_or_else(|| unsupported(&product))?;
        self.chosen.insert(product, choice);
        Ok(f64::from(time) / 1e3)
    }

    unsafe fn launch(
        &self,
        product: &Product,
        described: &Descriptors,
        at: &Operands,
        choice: &Choice,
    ) -> Result<(), result::CublasError> {
        let (alpha, beta) = (1.0f32, if product.accumulate { 1.0f32 } else { 0.0 });
        let [a, b, d] = described.layouts;
        let (first, second) = match product.pass {
            Pass::Forward | Pass::InputGradient => (at.right, at.left),
            Pass::WeightGradient => (at.left, at.right),
        };
        let addend = if product.accumulate { at.addend } else { at.result };
        // SAFETY: the descriptors live, and the caller promises the addresses.
        unsafe {
            result::matmul(
                self.handle,
                described.matmul,
                (&raw const alpha).cast(),
                (&raw const beta).cast(),
                first as *const c_void,
                a,
                second as *const c_void,
                b,
                addend as *const c_void,
                d,
                at.result as *mut c_void,
                d,
                &raw const choice.algorithm,
                self.workspace as *mut c_void,
                choice.workspace,
                self.stream.cu_stream().cast(),
            )
        }
    }

    fn describe(&self, product: &Product, at: &Operands) -> Result<Descriptors, CudaError> {
        let error = || failed::<result::CublasError>("describing a product");
        let Product { rows, inputs, outputs, .. } = *product;
        // Rows and columns of A, B and D, columns first.
        let (shapes, transposed) = match product.pass {
            Pass::Forward => ([(inputs, outputs), (inputs, rows), (outputs, rows)], [true, false]),
            Pass::InputGradient => {
                ([(inputs, outputs), (outputs, rows), (inputs, rows)], [false, false])
            }
            Pass::WeightGradient => {
                ([(inputs, rows), (outputs, rows), (inputs, outputs)], [false, true])
            }
        };
        let (operand, output) = (data_type(product.operand), data_type(product.result));
        let types = [operand, operand, output];
        let mut layouts = [std::ptr::null_mut(); 3];
        for ((layout, (height, width)), ty) in layouts.iter_mut().zip(shapes).zip(types) {
            *layout =
                result::create_matrix_layout(ty, height, width, height as i64).map_err(error())?;
        }
        let compute = sys::cublasComputeType_t::CUBLAS_COMPUTE_32F;
        let matmul =
            result::create_matmul_desc(compute, sys::cudaDataType_t::CUDA_R_32F).map_err(error())?;
        let described = Descriptors { matmul, layouts };
        use sys::cublasLtMatmulDescAttributes_t as Attribute;
        let set = |attribute, value: *const c_void, bytes| {
            // SAFETY: the descriptor lives, and the value has the attribute's size.
            unsafe { result::set_matmul_desc_attribute(matmul, attribute, value, bytes) }
                .map_err(error())
        };
        let word = |attribute, value: u32| set(attribute, (&raw const value).cast(), 4);
        let long = |attribute, value: u64| set(attribute, (&raw const value).cast(), 8);
        word(Attribute::CUBLASLT_MATMUL_DESC_TRANSA, u32::from(transposed[0]))?;
        word(Attribute::CUBLASLT_MATMUL_DESC_TRANSB, u32::from(transposed[1]))?;
        use sys::cublasLtEpilogue_t as E;
        let epilogue = match product.epilogue {
            Epilogue::None => E::CUBLASLT_EPILOGUE_DEFAULT,
            Epilogue::Bias => E::CUBLASLT_EPILOGUE_BIAS,
            Epilogue::BiasGelu => E::CUBLASLT_EPILOGUE_GELU_AUX_BIAS,
            Epilogue::GeluGradient => E::CUBLASLT_EPILOGUE_DGELU,
            Epilogue::GeluGradientBias => E::CUBLASLT_EPILOGUE_DGELU_BGRAD,
            Epilogue::BiasGradient => E::CUBLASLT_EPILOGUE_BGRADB,
        };
        word(Attribute::CUBLASLT_MATMUL_DESC_EPILOGUE, epilogue as u32)?;
        if !matches!(product.epilogue, Epilogue::None | Epilogue::GeluGradient) {
            long(Attribute::CUBLASLT_MATMUL_DESC_BIAS_POINTER, at.bias)?;
            let bias = match product.epilogue {
                Epilogue::BiasGradient => data_type(product.result),
                Epilogue::None
                | Epilogue::Bias
                | Epilogue::BiasGelu
                | Epilogue::GeluGradient
                | Epilogue::GeluGradientBias => operand,
            };
            word(Attribute::CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, bias as u32)?;
        }
        let keeps = [Epilogue::BiasGelu, Epilogue::GeluGradient, Epilogue::GeluGradientBias];
        if keeps.contains(&product.epilogue) {
            long(Attribute::CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, at.kept)?;
            long(Attribute::CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, shapes[2].0)?;
            word(Attribute::CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_DATA_TYPE, operand as u32)?;
        }
        Ok(described)
    }

    fn candidates(
        &self,
        product: &Product,
        described: &Descriptors,
        most: usize,
    ) -> Result<Vec<Choice>, CudaError> {
        let error = || failed::<result::CublasError>("choosing an algorithm");
        let preference = result::create_matmul_pref().map_err(error())?;
        let bytes = self.workspace_bytes;
        // SAFETY: plain numbers, for which zero is a value.
        let empty: sys::cublasLtMatmulHeuristicResult_t = unsafe { std::mem::zeroed() };
        let mut found = vec![empty; most];
        let mut count = 0;
        let [a, b, d] = described.layouts;
        // SAFETY: the descriptors live, and `found` has room for `most` results.
        let asked = unsafe {
            result::set_matmul_pref_attribute(
                preference,
                sys::cublasLtMatmulPreferenceAttributes_t::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
                (&raw const bytes).cast(),
                size_of::<usize>(),
            )
            .and_then(|()| {
                sys::cublasLtMatmulAlgoGetHeuristic(
                    self.handle,
                    described.matmul,
                    a,
                    b,
                    d,
                    d,
                    preference,
                    most as i32,
                    found.as_mut_ptr(),
                    &raw mut count,
                )
                .result()
            })
        };
        // SAFETY: created above.
        unsafe { result::destroy_matmul_pref(preference) }.map_err(error())?;
        asked.map_err(|_| unsupported(product))?;
        let fits = |found: &&sys::cublasLtMatmulHeuristicResult_t| found.state.result().is_ok();
        let chosen = found.iter().take(usize::try_from(count).unwrap_or(0)).filter(fits);
        let chosen: Vec<Choice> = chosen
            .map(|found| Choice { algorithm: found.algo, workspace: found.workspaceSize })
            .collect();
        if chosen.is_empty() { Err(unsupported(product)) } else { Ok(chosen) }
    }
}

impl Drop for Products {
    fn drop(&mut self) {
        // SAFETY: created in `new`, destroyed once.
        let _ = unsafe { result::destroy_handle(self.handle) };
    }
}

fn unsupported(product: &Product) -> CudaError {
    CudaError::Call {
        call: format!("{product:?}"),
        what: "cuBLASLt has no algorithm for it".into(),
    }
}

const fn data_type(element: ElementType) -> sys::cudaDataType_t {
    match element {
        ElementType::F32 => sys::cudaDataType_t::CUDA_R_32F,
        ElementType::Bf16 => sys::cudaDataType_t::CUDA_R_16BF,
        ElementType::F16 => sys::cudaDataType_t::CUDA_R_16F,
    }
}
