"""The allow-list of ops that may be replayed, so that their outputs need not be kept.

An op is listed if it gives the same bits for the same inputs, grad mode, numeric settings, random state and device. It
is an allow-list because a missing entry in a deny-list would fail silently. The outputs of all other ops (collectives,
custom and non-aten ops, Triton kernels, compiled regions, sparse kernels) are kept or swapped. Every listed op in
torch's own op database was replayed and compared bit for bit (tests/same_bits/test_torch_ops.py).

`empty` and its variants are not listed: the C++ function `at::tensor` fills an `empty` tensor where no dispatch mode
sees it (the target lengths inside `F.ctc_loss`), and a replay would return uninitialized memory. An op that overwrites
all of an empty tensor needs no replay of it. Constants are replayed only if they were made with grad mode on
(`is_constant` in facts.py). `_trilinear` is not listed either: its result depends on autocast, which is off in a replay
([Note: autocast inside an op] in facts.py).
"""

from __future__ import annotations

from typing import Final

RECOMPUTABLE: Final = frozenset(
    """
    _adaptive_avg_pool2d _adaptive_avg_pool2d_backward _adaptive_avg_pool3d _adaptive_avg_pool3d_backward
    _addmm_activation _amp_update_scale_ _batch_norm_with_update _cdist_backward _cdist_forward _conj_physical
    _conv_depthwise2d _efficient_attention_forward _embedding_bag _fft_c2c _fft_c2r _fft_r2c _flash_attention_forward
    _foreach_add _foreach_add_ _foreach_mul _foreach_mul_ _fused_rms_norm _index_put_impl_ _int_mm _linalg_det
    _linalg_eigh _linalg_slogdet _linalg_solve_ex _linalg_svd _log_softmax _log_softmax_backward_data
    _native_batch_norm_legit _nested_tensor_size _pad_circular _pdist_forward _prelu_kernel _safe_softmax
    _scaled_dot_product_efficient_attention _scaled_dot_product_flash_attention
    _scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_flash_attention_for_cpu_backward
    _scaled_dot_product_fused_attention_overrideable _softmax _softmax_backward_data _thnn_fused_gru_cell
    _thnn_fused_lstm_cell _to_copy _unique2 _unsafe_masked_index _unsafe_masked_index_put_accumulate
    _upsample_bilinear2d_aa _upsample_nearest_exact1d _upsample_nearest_exact2d _weight_int4pack_mm
    _weight_norm_interface abs abs_ acos acosh adaptive_max_pool2d adaptive_max_pool3d add add_ addbmm addcdiv
    addcdiv_ addcmul addcmul_ addmm addmm_ addmv addr alias_copy all amax amin aminmax angle any arange argmax argmin
    argsort as_strided_copy as_strided_scatter asin asinh atan atan2 atan2_ atanh avg_pool2d avg_pool2d_backward
    avg_pool3d avg_pool3d_backward baddbmm baddbmm_ bartlett_window bernoulli bernoulli_ binary_cross_entropy
    binary_cross_entropy_backward binary_cross_entropy_with_logits bincount bitwise_and bitwise_and_
    bitwise_left_shift bitwise_not bitwise_not_ bitwise_or bitwise_or_ bitwise_right_shift bitwise_xor blackman_window
    block_diag bmm bucketize cat cauchy_ ceil ceil_ celu celu_ channel_shuffle cholesky cholesky_inverse
    cholesky_solve clamp clamp_ clamp_max clamp_max_ clamp_min clamp_min_ clone col2im complex constant_pad_nd
    convolution convolution_backward copy_ copysign cos cos_ cosh count_nonzero cummax cummin cumprod cumsum cumsum_
    deg2rad diag_embed diagonal_backward diagonal_copy diagonal_scatter digamma dist div div_ dot elu elu_
    elu_backward embedding embedding_dense_backward eq eq_ erf erf_ erfc erfc_ erfinv exp exp2 exp_ expand_copy expm1
    expm1_ exponential_ eye fill fill_ flip floor floor_ fmax fmin fmod fmod_ frac fractional_max_pool2d
    fractional_max_pool3d frexp full full_like gather gather_backward ge ge_ gelu gelu_ gelu_backward geometric_ glu
    glu_backward grid_sampler_2d grid_sampler_2d_backward grid_sampler_3d gt gt_ hamming_window hann_window hardshrink
    hardsigmoid hardsigmoid_ hardsigmoid_backward hardswish hardswish_ hardswish_backward hardtanh hardtanh_
    hardtanh_backward histc huber_loss huber_loss_backward hypot hypot_ i0 im2col index index_add index_add_
    index_copy index_copy_ index_fill index_fill_ index_put index_put_ index_reduce index_select isinf isnan isneginf
    isposinf kaiser_window kthvalue ldexp le le_ leaky_relu leaky_relu_ leaky_relu_backward lerp lerp_ lgamma
    linalg_cholesky_ex linalg_cross linalg_eig linalg_householder_product linalg_inv_ex linalg_lu linalg_lu_factor_ex
    linalg_lu_solve linalg_matrix_exp linalg_pinv linalg_qr linalg_solve_triangular linalg_vector_norm linspace log
    log10 log1p log1p_ log2 log_ log_normal_ log_sigmoid_backward log_sigmoid_forward log_softmax logaddexp logaddexp2
    logcumsumexp logical_and logical_and_ logical_not logical_not_ logical_or logical_or_ logical_xor logit
    logit_backward logspace logsumexp lt lt_ lu_unpack masked_fill masked_fill_ masked_scatter masked_scatter_
    masked_select max max_pool2d_with_indices max_pool2d_with_indices_backward max_pool3d_with_indices
    max_pool3d_with_indices_backward max_unpool2d max_unpool3d maximum mean median min minimum mish mish_
    mish_backward mkldnn_convolution mkldnn_rnn_layer mm mode mse_loss mse_loss_backward mul mul_ multi_margin_loss
    multilabel_margin_loss_forward mv mvlgamma nan_to_num nan_to_num_ nanmedian nansum narrow_copy native_batch_norm
    native_batch_norm_backward native_channel_shuffle native_dropout native_dropout_backward native_group_norm
    native_group_norm_backward native_layer_norm native_layer_norm_backward ne ne_ neg neg_ new_full new_ones
    new_zeros nextafter nll_loss2d_backward nll_loss2d_forward nll_loss_backward nll_loss_forward nonzero norm normal
    normal_ ones ones_like ormqr permute_copy pixel_shuffle pixel_unshuffle polar polygamma pow pow_ prod put put_
    rad2deg rand rand_like randint randint_like randn randn_like random_ randperm reciprocal reciprocal_
    reflection_pad1d reflection_pad1d_backward reflection_pad2d reflection_pad2d_backward relu relu_ remainder
    remainder_ renorm repeat repeat_interleave replication_pad1d replication_pad1d_backward replication_pad2d
    replication_pad2d_backward roll rot90 round round_ rrelu_with_noise rrelu_with_noise_ rrelu_with_noise_functional
    rsqrt rsqrt_ rsub scalar_tensor scatter scatter_ scatter_add scatter_add_ scatter_reduce searchsorted
    select_backward select_scatter selu_ sgn sgn_ sigmoid sigmoid_ sigmoid_backward sign sign_ silu silu_
    silu_backward sin sin_ sinc sinh slice_backward slice_scatter slow_conv3d_forward slow_conv_transpose2d
    smooth_l1_loss smooth_l1_loss_backward soft_margin_loss softmax softplus softplus_backward softshrink sort
    special_airy_ai special_bessel_j0 special_bessel_j1 special_entr special_erfcx special_i0e special_i1 special_i1e
    special_log_ndtr special_modified_bessel_i0 special_modified_bessel_i1 special_ndtri special_xlog1py special_zeta
    split_with_sizes_copy sqrt sqrt_ square_ squeeze_copy stack std std_mean sub sub_ sum t_copy take tan tanh tanh_
    tanh_backward thnn_conv2d threshold threshold_ threshold_backward topk trace trace_backward transpose_copy
    triangular_solve tril tril_ triu triu_ trunc trunc_ unbind_copy unfold_backward unfold_copy uniform_
    unique_consecutive unique_dim unsafe_split unsqueeze_copy upsample_bicubic2d upsample_bicubic2d_backward
    upsample_bilinear2d upsample_bilinear2d_backward upsample_linear1d upsample_linear1d_backward upsample_nearest1d
    upsample_nearest1d_backward upsample_nearest2d upsample_nearest2d_backward upsample_trilinear3d var var_mean vdot
    view_copy where xlogy xlogy_ zero_ zeros zeros_like
    """.split()  # noqa: SIM905 - one name per line would be eight hundred lines
)
